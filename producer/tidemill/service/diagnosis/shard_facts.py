"""What one shard holds, read in a handful of round trips."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import ResponseError

from tidemill.protocol.codec import decode
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.keys import GROUP, ShardKeys
from tidemill.protocol.messages import WorkerInfo
from tidemill.protocol.stored import stored_number, stored_text
from tidemill.service.diagnosis.counting import MAX_QUEUES, read_miscounts
from tidemill.service.diagnosis.damage import Damage, read_damage
from tidemill.service.diagnosis.replies import Command, ask, read
from tidemill.service.redis import translate

#: Later than any time; a score may be infinite.
_LATEST_MS = 2.0**53
#: An entry of the front door that the scheduler has had for longer is worth a look.
LONG_PENDING_MS = 60_000
_MAX_PENDING = 1000


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One ingress queue; ages are those of the oldest entry, None if there is none.

    Pending entries are those that the scheduler has read and not dispatched.
    """

    name: str
    num_entries: int
    age_ms: int | None
    num_pending: int
    pending_age_ms: int | None


@dataclass(frozen=True, slots=True)
class FrontFacts:
    """Entries of the front door that the scheduler has had for more than a minute."""

    num_late: int
    oldest_ms: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HookFacts:
    """Ends that are to be told by webhook, and deliveries on their way.

    ``event_ms`` is how long the oldest end has waited, ``overdue_ms`` how long ago the first
    delivery should have been tried, negative while none should; None if there is none.
    """

    num_events: int
    event_ms: int | None
    num_deliveries: int
    overdue_ms: int | None


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What one shard holds; times in ms of the server's clock.

    A live worker whose registration cannot be read is None.  ``overdue_ms`` is how long ago the
    oldest lease ran out, negative while it holds; ``late_ms`` how long ago the first delayed job
    could have run.  ``libraries`` maps those that are loaded to whether a process has announced
    that it uses them; empty if this user may not know.
    ``miscounts`` maps a counter to its difference from what it counts.
    """

    leader: str | None
    leader_lease_ms: int
    epoch: int
    workers: tuple[WorkerInfo | None, ...]
    models: tuple[str, ...]
    num_running: int
    overdue_ms: int | None
    queues: tuple[QueueFacts, ...]
    num_dead_letters: int
    num_delayed: int
    late_ms: int | None
    libraries: Mapping[str, bool]
    miscounts: Mapping[str, int]
    damage: Damage
    front: FrontFacts
    hooks: HookFacts

    @property
    def num_queued(self) -> int:
        """Jobs that wait for a worker."""
        return sum(queue.num_entries for queue in self.queues)


def read_shard(client: redis.Redis, keys: ShardKeys) -> ShardFacts:
    """Read the state of the shard in a handful of round trips."""
    time, leader, lease_ms, epoch, workers, models, num_running, oldest, names, num_dead = read(
        client,
        [
            ("TIME",),
            ("GET", keys.leader),
            ("PTTL", keys.leader),
            ("GET", keys.epoch),
            ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
            ("ZRANGE", keys.models, 0, -1, "WITHSCORES"),
            ("ZCARD", keys.running),
            ("ZRANGE", keys.running, 0, 0, "WITHSCORES"),
            ("ZRANGE", keys.active_queues, 0, MAX_QUEUES - 1),
            ("XLEN", keys.dead_letters),
        ],
    )
    now = int(time[0]) * 1000 + int(time[1]) // 1000
    num_delayed, next_delayed = read(
        client,
        [("ZCARD", keys.delayed), ("ZRANGE", keys.delayed, 0, 0, "WITHSCORES")],
    )
    return ShardFacts(
        leader=None if leader is None else stored_text(leader),
        leader_lease_ms=int(lease_ms),
        epoch=stored_number(epoch) or 0,
        workers=_read_workers(client, keys, _unexpired(now, workers)),
        models=_unexpired(now, models),
        num_running=int(num_running),
        overdue_ms=_past(now, oldest),
        queues=_read_queues(client, keys, now, [stored_text(name) for name in names]),
        num_dead_letters=int(num_dead),
        num_delayed=int(num_delayed),
        late_ms=_past(now, next_delayed),
        libraries=_read_libraries(client, keys, now),
        miscounts=read_miscounts(client, keys),
        damage=read_damage(client, keys),
        front=_read_front(client, keys),
        hooks=_read_hooks(client, keys, now),
    )


def _read_front(client: redis.Redis, keys: ShardKeys) -> FrontFacts:
    try:
        with translate():
            late: Any = client.xpending_range(
                keys.front_door, GROUP, "-", "+", _MAX_PENDING, idle=LONG_PENDING_MS
            )
    except ResponseError:  # no group: nobody has read there yet
        late = []
    return FrontFacts(
        num_late=len(late),
        oldest_ms=max((entry["time_since_delivered"] for entry in late), default=0),
        examples=tuple(entry["message_id"].decode() for entry in late[:3]),
    )


def _read_hooks(client: redis.Redis, keys: ShardKeys, now: int) -> HookFacts:
    num_events, first, num_deliveries, due = read(
        client,
        [
            ("XLEN", keys.outbox),
            ("XRANGE", keys.outbox, "-", "+", "COUNT", 1),
            ("ZCARD", keys.due_deliveries),
            ("ZRANGE", keys.due_deliveries, 0, 0, "WITHSCORES"),
        ],
    )
    age = _age(now, first[0][0]) if first else None
    return HookFacts(int(num_events), age, int(num_deliveries), _past(now, due))


def _past(now: int, first: Sequence[bytes]) -> int | None:
    return now - int(max(0.0, min(float(first[1]), _LATEST_MS))) if first else None


def _unexpired(now: int, members: Sequence[bytes]) -> tuple[str, ...]:
    pairs = zip(members[::2], members[1::2], strict=True)
    return tuple(sorted(stored_text(name) for name, expiry in pairs if float(expiry) > now))


def _read_workers(
    client: redis.Redis, keys: ShardKeys, worker_ids: Sequence[str]
) -> tuple[WorkerInfo | None, ...]:
    infos = read(client, [("HGET", keys.worker_info(w), "info") for w in worker_ids])
    return tuple(map(_worker, infos))


def _worker(info: bytes | None) -> WorkerInfo | None:
    try:
        return decode(info or b"", WorkerInfo)
    except ProtocolError:
        return None


def _read_queues(
    client: redis.Redis, keys: ShardKeys, now: int, names: Sequence[str]
) -> tuple[QueueFacts, ...]:
    commands: list[Command] = []
    for name in names:
        stream = keys.ingress(name)
        commands += [
            ("XLEN", stream),
            ("XRANGE", stream, "-", "+", "COUNT", 1),
            # Refused where the queue has just been retired, and its group with it.
            ("XPENDING", stream, GROUP),
        ]
    replies = iter(ask(client, commands))
    return tuple(_queue(name, now, next(replies), next(replies), next(replies)) for name in names)


def _queue(name: str, now: int, length: Any, first: Any, pending: Any) -> QueueFacts:
    pending = pending or {"pending": 0, "min": None}
    return QueueFacts(
        name=name,
        num_entries=int(length or 0),
        age_ms=_age(now, first[0][0]) if first else None,
        num_pending=int(pending["pending"]),
        pending_age_ms=_age(now, pending["min"]) if pending["min"] else None,
    )


def _age(now: int, entry_id: bytes) -> int:
    # The server names entries by its own clock.
    return now - int(entry_id.partition(b"-")[0])


def _read_libraries(client: redis.Redis, keys: ShardKeys, now: int) -> Mapping[str, bool]:
    (loaded,) = ask(client, [("FUNCTION LIST", "LIBRARYNAME", "tm*")])
    (announced,) = read(client, [("ZRANGE", keys.libraries, 0, -1, "WITHSCORES")])
    in_use = _unexpired(now, announced)
    names = [
        dict(zip(some[::2], some[1::2], strict=True))[b"library_name"] for some in loaded or ()
    ]
    return {name.decode(): name.decode() in in_use for name in names}
