"""Does work get on: leader, workers, leases, queues, counters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from tidemill.protocol.codec import decode
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.functions import LIBRARY
from tidemill.protocol.keys import GROUP, ShardKeys
from tidemill.protocol.messages import WorkerInfo
from tidemill.service.diagnosis.counting import MAX_QUEUES, read_miscounts
from tidemill.service.diagnosis.finding import Finding, duration, failure, ok, warning
from tidemill.service.diagnosis.replies import Command, ask, read

#: What a leader that has just taken over may still owe: a lease of grace and a pass.
_OVERDUE_FAILURE_MS = 30_000
#: A job that waits longer than this is worth a look, by priority class.
_LONG_WAIT_MS = {"p0": 60_000, "p1": 3_600_000, "p2": 86_400_000}


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
        leader=None if leader is None else leader.decode(),
        leader_lease_ms=int(lease_ms),
        epoch=int(epoch or 0),
        workers=_read_workers(client, keys, _unexpired(now, workers)),
        models=_unexpired(now, models),
        num_running=int(num_running),
        overdue_ms=_past(now, oldest),
        queues=_read_queues(client, keys, now, [name.decode("utf-8", "replace") for name in names]),
        num_dead_letters=int(num_dead),
        num_delayed=int(num_delayed),
        late_ms=_past(now, next_delayed),
        libraries=_read_libraries(client, keys, now),
        miscounts=read_miscounts(client, keys),
    )


def check_shard_facts(facts: ShardFacts) -> list[Finding]:
    """Judge whether work gets on."""
    return [
        _leader(facts),
        _workers(facts),
        _leases(facts),
        _queues(facts),
        _delayed(facts),
        _pending(facts),
        _counters(facts),
        _dead_letters(facts),
        _old_functions(facts),
    ]


def _past(now: int, first: Sequence[bytes]) -> int | None:
    return now - int(float(first[1])) if first else None


def _unexpired(now: int, members: Sequence[bytes]) -> tuple[str, ...]:
    pairs = zip(members[::2], members[1::2], strict=True)
    return tuple(sorted(name.decode() for name, expiry in pairs if float(expiry) > now))


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


def _leader(facts: ShardFacts) -> Finding:
    fix = "Start a scheduler: `tidemill up`, or `python -m tidemill_scheduler`."
    if facts.leader is None:
        return failure("leader", "none: nothing is dispatched", fix)
    finding = f"{facts.leader} in epoch {facts.epoch}"
    if facts.leader_lease_ms == -1:
        return failure("leader", f"{finding} with a lease that never ends", fix)
    return ok("leader", f"{finding}, lease for another {duration(facts.leader_lease_ms)}")


def _workers(facts: ShardFacts) -> Finding:
    served = {info.model for info in facts.workers if info}
    idle = sorted(set(facts.models) - served)
    finding = f"{len(facts.workers)} live, serving {', '.join(sorted(served)) or 'nothing'}"
    if not facts.workers and facts.num_queued:
        fix = "Start a worker: `tidemill up`, or `python -m tidemill_gpuworker --model DIR`."
        return failure("workers", f"none, but {facts.num_queued} jobs wait", fix)
    if None in facts.workers:
        return warning(
            "workers",
            f"{finding}; {facts.workers.count(None)} cannot be read",
            "Run the same version of Tidemill everywhere.",
        )
    if idle or not facts.workers:
        unserved = f"; nobody serves {', '.join(idle)}" if idle else ""
        return warning("workers", finding + unserved, "Start workers for what clients may ask for.")
    return ok("workers", finding)


def _leases(facts: ShardFacts) -> Finding:
    running = f"{facts.num_running} jobs run"
    if facts.overdue_ms is None or facts.overdue_ms <= 0:
        return ok("leases", f"{running}, no lease is overdue")
    finding = f"{running}, the oldest lease ran out {duration(facts.overdue_ms)} ago"
    if facts.overdue_ms < _OVERDUE_FAILURE_MS:
        return warning("leases", finding, "Look again in a moment: the scheduler requeues it.")
    return failure("leases", finding, "See why the leading scheduler does not reap: its log.")


def _queues(facts: ShardFacts) -> Finding:
    waiting = [queue for queue in facts.queues if queue.age_ms is not None]
    if not waiting:
        return ok("queues", "no job waits")
    oldest = max(waiting, key=lambda queue: queue.age_ms or 0)
    finding = (
        f"{facts.num_queued} jobs wait in {len(waiting)} queues, the oldest for"
        f" {duration(oldest.age_ms or 0)} in {oldest.name}"
    )
    late = [queue.name for queue in waiting if (queue.age_ms or 0) > _limit(queue.name)]
    if not late:
        return ok("queues", finding)
    return warning(
        "queues",
        f"{finding}; too long in {', '.join(late[:5])}",
        "Add workers, or see with `tidemill status` why those there are get no jobs.",
    )


def _delayed(facts: ShardFacts) -> Finding:
    finding = f"{facts.num_delayed} jobs wait for their time"
    if facts.late_ms is None or facts.late_ms <= 0:
        return ok("delayed", finding)
    finding += f", the first could have run {duration(facts.late_ms)} ago"
    if facts.late_ms < _OVERDUE_FAILURE_MS:
        return ok("delayed", finding)
    return failure("delayed", finding, "See why the leading scheduler does not promote: its log.")


def _limit(queue_name: str) -> int:
    return _LONG_WAIT_MS.get(queue_name.partition(":")[0], 0)


def _pending(facts: ShardFacts) -> Finding:
    check = "pending entries"
    num = sum(queue.num_pending for queue in facts.queues)
    ages = [queue.pending_age_ms for queue in facts.queues if queue.pending_age_ms is not None]
    finding = f"{num} read and not dispatched"
    if ages:
        finding += f", the oldest for {duration(max(ages))}"
    gone = [queue.name for queue in facts.queues if queue.num_pending > queue.num_entries]
    if gone and facts.leader is None:
        return warning(
            check,
            f"{finding}; some of {', '.join(gone[:5])} are deleted",
            "Start a scheduler: it clears them when it takes over.",
        )
    return ok(check, finding)


def _counters(facts: ShardFacts) -> Finding:
    if not facts.miscounts:
        return ok("counters", "they agree with the queues")
    shown = ", ".join(f"{name} by {by:+d}" for name, by in sorted(facts.miscounts.items())[:5])
    return warning(
        "counters",
        f"{len(facts.miscounts)} off: {shown}",
        "Correct them with HINCRBY on the shard's `cnt`; a tenant's bound depends on it.",
    )


def _dead_letters(facts: ShardFacts) -> Finding:
    if not facts.num_dead_letters:
        return ok("dead letters", "none")
    return warning(
        "dead letters",
        f"{facts.num_dead_letters} jobs or entries were given up",
        "See `tidemill dlq`: it tells their reasons, and puts back or drops them.",
    )


def _old_functions(facts: ShardFacts) -> Finding:
    check = "old functions"
    others = sorted(facts.libraries.keys() - {LIBRARY})
    unused = [name for name in others if not facts.libraries[name]]
    if not unused:
        return ok(check, f"in use: {', '.join(others)}" if others else "none")
    return warning(
        check,
        f"no process of this shard has used {', '.join(unused)} for a day",
        "None if the leader's user may delete functions; else, as the deploy user and if no other"
        f" shard uses them: redis-cli FUNCTION DELETE {unused[0]}.",
    )
