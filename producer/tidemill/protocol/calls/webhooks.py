"""Calls by which events leave the outbox and reach their endpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from tidemill.protocol.calls.lifetimes import DELIVERY_TTL_MS
from tidemill.protocol.calls.replies import text
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys

#: Endpoints of one tenant.
MAX_ENDPOINTS = 32
#: Deliveries that a tenant's log names.
DELIVERY_LOG_SIZE = 10_000
#: A delivery that has not succeeded by then is given up, whatever kept it.
GIVE_UP_MS = 4 * 24 * 3600 * 1000
#: A circuit that nobody has used for so long is closed.
CIRCUIT_TTL_MS = 24 * 3600 * 1000

#: Stands for an endpoint where an event goes to the address that came with its job.
CALLBACK = "callback"

#: Edits an endpoint and leaves it on or off.
AS_IT_IS = "="


def endpoint_field(endpoint_id: str) -> str:
    """Return the field of a tenant's hooks that describes an endpoint."""
    return f"e:{endpoint_id}"


def off_field(endpoint_id: str) -> str:
    """Return the field that tells why an endpoint is off."""
    return f"off:{endpoint_id}"


class Edited(IntEnum):
    """What became of an edit."""

    DONE = 1
    CHANGED = 0
    TOO_MANY = -1


class Refusal(StrEnum):
    """Why a delivery cannot be taken now, or ever."""

    GONE = "gone"
    ENDED = "ended"
    EARLY = "early"
    TAKEN = "taken"
    OLD = "old"
    OPEN = "open"
    CROWDED = "crowded"


class Outcome(StrEnum):
    """How an attempt went."""

    DELIVERED = "delivered"
    RETRY = "retry"
    FAILED = "failed"


class Counts(IntEnum):
    """What an attempt says about its endpoint: it answered, nothing, or it failed."""

    ANSWER = -1
    NOTHING = 0
    FAILURE = 1


@dataclass(frozen=True, slots=True)
class Posting:
    """An event for one endpoint; ``circuit`` names what fails together with it."""

    delivery_id: str
    endpoint_id: str
    url: str
    circuit: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery that is the caller's until the lease ends.

    ``attempt`` is its fence, ``tries`` those since it was made or replayed, this one included;
    ``failures`` are those of the endpoint in a row.
    """

    attempt: int
    now_ms: int
    failures: int
    tries: int
    tenant: str
    endpoint_id: str
    url: str
    circuit: str
    event_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Mark:
    """How an attempt went, and what follows."""

    outcome: Outcome
    note: str
    counts: Counts
    pause_ms: int = 0
    cooldown_ms: int = 0
    off_reason: str = ""


def edit_hook(
    keys: ShardKeys, *, tenant: str, field: str, expected: str, new: str, off: str = AS_IT_IS
) -> Call[Edited]:
    """Write a field of a tenant's hooks if it still holds ``expected``; "" stands for absent."""
    return Call(
        "edit_hook",
        (keys.hooks(tenant),),
        (field, expected, new, off, MAX_ENDPOINTS),
        lambda reply: Edited(int(reply)),
    )


def test_hook(keys: ShardKeys, *, tenant: str, endpoint_id: str, event_id: str) -> Call[str]:
    """Ask for an event that only tests an endpoint."""
    return Call("test_hook", (keys.outbox,), (tenant, endpoint_id, event_id), text)


# pytest would take it for a test where it is imported by its name.
test_hook.__test__ = False  # type: ignore[attr-defined]


def post_event(
    keys: ShardKeys,
    *,
    entry_id: str,
    tenant: str,
    event_type: str,
    event_id: str,
    body: bytes,
    postings: Sequence[Posting],
) -> Call[bool]:
    """Turn an entry of the outbox into deliveries; false if somebody was faster."""
    places = (
        p for one in postings for p in (one.delivery_id, one.endpoint_id, one.url, one.circuit)
    )
    return Call(
        "post_event",
        (
            keys.outbox,
            keys.due_deliveries,
            keys.delivery_log(tenant),
            *(keys.delivery(one.delivery_id) for one in postings),
        ),
        (
            entry_id,
            tenant,
            DELIVERY_TTL_MS,
            GIVE_UP_MS,
            DELIVERY_LOG_SIZE,
            event_type,
            event_id,
            body,
            *places,
        ),
        bool,
    )


def take_delivery(
    keys: ShardKeys,
    *,
    delivery_id: str,
    tenant: str,
    circuit: str,
    lease_ms: int,
    max_in_flight: int,
    pause_ms: int,
    failures_to_open: int,
) -> Call[Taken | Refusal]:
    """Take a due delivery for one attempt."""
    return Call(
        "take_delivery",
        (
            keys.delivery(delivery_id),
            keys.due_deliveries,
            keys.deliveries_in_flight(tenant),
            keys.circuit(circuit),
        ),
        (delivery_id, lease_ms, max_in_flight, pause_ms, failures_to_open),
        _taken,
    )


def mark_delivery(keys: ShardKeys, *, delivery_id: str, taken: Taken, mark: Mark) -> Call[str]:
    """Note how an attempt went; replies the delivery's state, "" if it was somebody else's."""
    return Call(
        "mark_delivery",
        (
            keys.delivery(delivery_id),
            keys.due_deliveries,
            keys.deliveries_in_flight(taken.tenant),
            keys.circuit(taken.circuit),
            keys.hooks(taken.tenant),
        ),
        (
            delivery_id,
            taken.attempt,
            mark.outcome,
            mark.pause_ms,
            mark.note,
            DELIVERY_TTL_MS,
            int(mark.counts),
            mark.cooldown_ms,
            CIRCUIT_TTL_MS,
            taken.endpoint_id,
            mark.off_reason,
            taken.now_ms,
        ),
        text,
    )


def hand_delivery(
    keys: ShardKeys, *, delivery_id: str, attempts: int, hands: int, wait_ms: int
) -> Call[bool]:
    """Leave the next attempt to a queue; false if the delivery is not as it was read."""
    return Call(
        "hand_delivery",
        (keys.delivery(delivery_id), keys.due_deliveries),
        (delivery_id, attempts, hands, wait_ms),
        bool,
    )


def replay_delivery(keys: ShardKeys, *, delivery_id: str) -> Call[int]:
    """Begin a delivery again: 1 done, 0 not known, -1 an attempt runs."""
    return Call(
        "replay_delivery",
        (keys.delivery(delivery_id), keys.due_deliveries),
        (delivery_id, DELIVERY_TTL_MS, GIVE_UP_MS),
        int,
    )


def serve_hooks(keys: ShardKeys, *, worker_id: str, ttl_ms: int) -> Call[int]:
    """Say that a worker of the queue is there, with 0 that it leaves; replies how many are."""
    return Call("serve_hooks", (keys.hook_workers,), (worker_id, ttl_ms), int)


def _taken(reply: Sequence[Any]) -> Taken | Refusal:
    if int(reply[0]) == 0:
        return Refusal(text(reply[1]))
    attempt, now_ms, failures, flat = reply
    fields: Mapping[str, bytes] = {
        text(name): bytes(value) for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
    return Taken(
        attempt=int(attempt),
        now_ms=int(now_ms),
        failures=int(failures),
        tries=int(fields.get("tr", b"1")),
        tenant=text(fields["tn"]),
        endpoint_id=text(fields["ep"]),
        url=text(fields["url"]),
        circuit=text(fields["br"]),
        event_id=text(fields["ev"]),
        body=fields["bd"],
    )
