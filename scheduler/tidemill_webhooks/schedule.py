"""What follows from an attempt: pure."""

from dataclasses import dataclass

from tidemill.protocol.calls.webhooks import CALLBACK, Counts, Outcome
from tidemill_webhooks.breaker import cooldown_ms

#: Between one try and the next, in s: ten tries over 75.6 hours.
PAUSES_SECONDS = (5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
MAX_TRIES = len(PAUSES_SECONDS) + 1
#: To a name that leads where it must not, in case its entry is about to be corrected: over 5 min.
MAX_TRIES_INSIDE = 3
JITTER = 0.1
#: Longest pause that a receiver can ask for.
MAX_RETRY_AFTER_SECONDS = 86400.0

GONE = 410
#: With these a receiver speaks for all that is sent to it.
_BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of an attempt: a status, or ``error`` and status 0.

    ``is_final`` tells that another try would fail in the same way, ``is_ours`` that the endpoint
    has no part in the failure, ``is_inside`` that its name led to an address that is not public.
    """

    status: int = 0
    retry_after_seconds: float = 0.0
    error: str = ""
    is_final: bool = False
    is_ours: bool = False
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a delivery and of its endpoint; see ``Mark``."""

    outcome: Outcome
    counts: Counts
    pause_ms: int = 0
    cooldown_ms: int = 0
    off_reason: str = ""


def judge(reply: Reply, *, tries: int, failures: int, endpoint_id: str, chance: float) -> Verdict:
    """Decide after try number ``tries`` to an endpoint that had failed ``failures`` times in a row.

    ``chance``, from 0 to 1, is where between 90 and 110 % of its length the pause lies.
    """
    if 200 <= reply.status < 300:
        return Verdict(Outcome.DELIVERED, Counts.ANSWER)
    if reply.status == GONE:
        off = "" if endpoint_id == CALLBACK else "it answered 410 Gone"
        return Verdict(Outcome.FAILED, Counts.ANSWER, off_reason=off)
    if reply.is_final:
        return Verdict(Outcome.FAILED, Counts.NOTHING)
    asked = _asked_ms(reply)
    cooldown = 0 if reply.is_ours else cooldown_ms(failures + 1)
    if reply.status in _BUSY:
        cooldown = max(cooldown, asked)
    counts = Counts.NOTHING if reply.is_ours else Counts.FAILURE
    if tries >= (MAX_TRIES_INSIDE if reply.is_inside else MAX_TRIES):
        return Verdict(Outcome.FAILED, counts, cooldown_ms=cooldown)
    return Verdict(Outcome.RETRY, counts, max(pause_ms(tries, chance), asked), cooldown)


def pause_ms(tries: int, chance: float) -> int:
    """Return the pause after so many tries, in ms."""
    factor = 1 - JITTER + 2 * JITTER * chance
    return round(1000 * PAUSES_SECONDS[min(max(tries, 1), len(PAUSES_SECONDS)) - 1] * factor)


def _asked_ms(reply: Reply) -> int:
    return round(1000 * min(max(reply.retry_after_seconds, 0.0), MAX_RETRY_AFTER_SECONDS))
