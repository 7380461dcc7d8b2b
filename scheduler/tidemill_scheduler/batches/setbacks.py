"""Batches whose work failed: when each may go on, and which of them never will; pure."""

from dataclasses import dataclass, field

from tidemill.protocol.errors import BlobError, BlobNotFound, BrokerError, StaleFence
from tidemill_scheduler.batches.lease import BatchName

_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0


def may_pass(error: Exception) -> bool:
    """Whether what failed is not the batch: the broker, the store, or that another works on it."""
    is_away = isinstance(error, BrokerError | BlobError | StaleFence)
    return is_away and not isinstance(error, BlobNotFound)


@dataclass(slots=True)
class _Setback:
    until: float = 0.0
    pause: float = _FIRST_PAUSE_SECONDS
    num_faults: int = 0
    states: set[str] = field(default_factory=set)
    most_lines: int = -1

    def rest(self, now: float) -> None:
        self.until = now + self.pause
        self.pause = min(2 * self.pause, _MAX_PAUSE_SECONDS)

    def note_progress(self, state: str, num_lines: int) -> None:
        """Begin the count again where a batch has come further than ever before."""
        if state not in self.states or num_lines > self.most_lines:
            self.num_faults, self.pause = 0, _FIRST_PAUSE_SECONDS
        self.states.add(state)
        self.most_lines = max(self.most_lines, num_lines)


class Setbacks:
    """What is remembered of batches that failed; times are those of one monotonic clock, in s.

    A fault is a failure of this program; that broker or store are away is none, however often.
    """

    def __init__(self, max_faults: int) -> None:
        self._max_faults = max_faults
        self._setbacks: dict[BatchName, _Setback] = {}

    def delay(self, name: BatchName, now: float) -> None:
        """Let a batch rest, each time longer."""
        self._setbacks.setdefault(name, _Setback()).rest(now)

    def note_fault(self, name: BatchName, progress: tuple[str, int], now: float) -> None:
        """Count a fault behind the state and the lines that the batch had come to; let it rest."""
        setback = self._setbacks.setdefault(name, _Setback())
        setback.note_progress(*progress)
        setback.num_faults += 1
        setback.rest(now)

    def rests(self, name: BatchName, now: float) -> bool:
        """Whether it is too early to go on with a batch."""
        return name in self._setbacks and now < self._setbacks[name].until

    def is_hopeless(self, name: BatchName) -> bool:
        """Whether a batch has had as many faults in one place as it may."""
        return self.num_faults(name) >= self._max_faults

    def num_faults(self, name: BatchName) -> int:
        """Return the number of faults since the batch came further."""
        return self._setbacks[name].num_faults if name in self._setbacks else 0

    def forget(self, name: BatchName) -> None:
        """Remember nothing of a batch: it went well, or is another's."""
        self._setbacks.pop(name, None)

    def keep_only(self, names: set[BatchName]) -> None:
        """Forget all other batches."""
        for name in self._setbacks.keys() - names:
            del self._setbacks[name]
