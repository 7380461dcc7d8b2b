"""Does work get on: leader, workers, leases, queues, counters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from tidemill.protocol.codec import decode
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.keys import GROUP, ShardKeys
from tidemill.protocol.messages import WorkerInfo
from tidemill.service.diagnosis.finding import Finding, duration, failure, ok, warning
from tidemill.service.diagnosis.replies import Command, ask, read

#: Queues and tenants that are looked at in one go.
MAX_QUEUES = 1000
#: What a leader that has just taken over may still owe: a lease of grace and a pass.
_OVERDUE_FAILURE_MS = 30_000
#: A job that waits longer than this is worth a look, by priority class.
_LONG_WAIT_MS = {"p0": 60_000, "p1": 3_600_000, "p2": 86_400_000}
_CLASSES = tuple(_LONG_WAIT_MS)


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
    oldest lease ran out, negative while it holds.
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
    return ShardFacts(
        leader=None if leader is None else leader.decode(),
        leader_lease_ms=int(lease_ms),
        epoch=int(epoch or 0),
        workers=_read_workers(client, keys, _unexpired(now, workers)),
        models=_unexpired(now, models),
        num_running=int(num_running),
        overdue_ms=now - int(float(oldest[1])) if oldest else None,
        queues=_read_queues(client, keys, now, [name.decode("utf-8", "replace") for name in names]),
        num_dead_letters=int(num_dead),
        miscounts=_read_miscounts(client, keys),
    )


def check_shard_facts(facts: ShardFacts) -> list[Finding]:
    """Judge whether work gets on."""
    return [
        _leader(facts),
        _workers(facts),
        _leases(facts),
        _queues(facts),
        _pending(facts),
        _counters(facts),
        _dead_letters(facts),
    ]


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


def _read_miscounts(client: redis.Redis, keys: ShardKeys) -> Mapping[str, int]:
    counters, names = read(
        client, [("HKEYS", keys.counters), ("ZRANGE", keys.active_queues, 0, MAX_QUEUES - 1)]
    )
    fields = [name.decode("utf-8", "replace") for name in counters]
    tenants = {field.removeprefix("q:") for field in fields if field.startswith("q:")}
    tenants |= {name.decode("utf-8", "replace").partition(":")[2] for name in names}
    differences = _differences(client, keys, sorted(tenants)[:MAX_QUEUES])
    return {counter: by for counter, by in differences.items() if by}


def _differences(client: redis.Redis, keys: ShardKeys, tenants: Sequence[str]) -> Mapping[str, int]:
    streams = [keys.ingress(f"{kind}:{tenant}") for tenant in tenants for kind in _CLASSES]
    # One instant, or jobs on the move would look miscounted.
    counters, num_running, *lengths = read(
        client,
        [
            ("HGETALL", keys.counters),
            ("ZCARD", keys.running),
            *(("XLEN", stream) for stream in streams),
        ],
        at_once=True,
    )
    counts = {name.decode("utf-8", "replace"): int(count) for name, count in counters.items()}
    counted = sum(count for name, count in counts.items() if name.startswith("r:"))
    differences = {"r:*": counted - int(num_running)}
    for index, tenant in enumerate(tenants):
        start = index * len(_CLASSES)
        waiting = sum(lengths[start : start + len(_CLASSES)])
        differences[f"q:{tenant}"] = counts.get(f"q:{tenant}", 0) - waiting
    return differences


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
        "Read their reasons in the shard's stream `dead`.",
    )
