"""A snapshot of one shard: what waits, what runs, who works."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from tidemill._reads import Read, now_ms, unexpired
from tidemill._receipt import UNKNOWN
from tidemill.protocol.calls import Backlog
from tidemill.protocol.codec import decode
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard, WorkerInfo, WorkerStatus
from tidemill.protocol.settings import bad_settings
from tidemill.protocol.stored import damaged_fields, stored_number, stored_numbers, stored_text
from tidemill.tenant_limits import TenantLimits, limits_of

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One ingress queue: its priority class, its tenant and how many jobs wait in it."""

    priority_class: str
    tenant: str
    num_waiting: int


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A live worker; ``status`` is None before it reported for the first time."""

    info: WorkerInfo
    status: WorkerStatus | None


@dataclass(frozen=True, slots=True)
class Status:
    """What ``Producer.status()`` returns; read in two round trips, so not quite one instant.

    ``num_queued`` counts jobs that no worker has, wherever they wait; the queues hold those that
    the scheduler has not dispatched, and ``num_delayed`` of them wait for their time.
    ``num_overdue`` jobs have passed a time limit and are about to expire; ``num_at_front_door``
    entries are not jobs yet.  ``durability`` is the level of jobs accepted now, and like
    ``jobs_per_second`` and ``max_bytes`` (0: no bound on ``queued_bytes``) what the leader has
    measured.  ``limits`` are the tenants' settings and queues.  ``scheduler_id`` is None while
    nobody leads.  ``notes`` tell which stored numbers cannot be read and count as 0 here, and
    which settings are invalid.
    """

    num_queued: int
    num_running: int
    num_delayed: int
    num_overdue: int
    num_dead_letters: int
    num_at_front_door: int
    queued_bytes: int
    max_bytes: int
    result_bytes: int
    durability: str
    jobs_per_second: float
    #: What waits in the classes of priority as the leader has told in the last seconds.
    backlog: Backlog | None
    limits: tuple[TenantLimits, ...]
    queued_by_tenant: dict[str, int]
    running_by_tenant: dict[str, int]
    queues: tuple[QueueStatus, ...]
    workers: tuple[WorkerSnapshot, ...]
    models: tuple[ModelCard, ...]
    scheduler_id: str | None
    scheduler_epoch: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overview:
    """The first round trip: counts, and the names of what to look at next."""

    now_ms: int
    counters: dict[str, int]
    limits: tuple[TenantLimits, ...]
    measures: dict[bytes, bytes]
    num_delayed: int
    num_dead_letters: int
    num_at_front_door: int
    queue_names: tuple[str, ...]
    worker_ids: tuple[str, ...]
    model_names: tuple[str, ...]
    scheduler_id: str | None
    scheduler_epoch: int
    notes: tuple[str, ...]


def overview(keys: ShardKeys) -> Read[Overview]:
    """Read the first half of a status."""
    return Read(
        (
            ("TIME",),
            ("HGETALL", keys.counters),
            ("XLEN", keys.dead_letters),
            ("ZRANGE", keys.active_queues, 0, -1),
            ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
            ("ZRANGE", keys.models, 0, -1, "WITHSCORES"),
            ("GET", keys.leader),
            ("GET", keys.epoch),
            ("HGETALL", keys.settings),
            ("HGETALL", keys.measures),
            ("ZCARD", keys.delayed),
            ("XLEN", keys.front_door),
        ),
        lambda replies: _overview(keys, replies),
    )


def details(keys: ShardKeys, seen: Overview) -> Read[Status]:
    """Read the second half: every queue, worker and model of ``seen``."""
    queues = [("XLEN", keys.ingress(name)) for name in seen.queue_names]
    infos = [("HGET", keys.worker_info(worker_id), "info") for worker_id in seen.worker_ids]
    reports = [
        ("XREVRANGE", keys.status(worker_id), "+", "-", "COUNT", 1) for worker_id in seen.worker_ids
    ]
    cards = [("HGET", keys.model(name), "card") for name in seen.model_names]
    overdue = ("ZCOUNT", keys.due, "-inf", seen.now_ms)
    return Read(
        (overdue, *queues, *infos, *reports, *cards), lambda replies: _status(seen, replies)
    )


def _overview(keys: ShardKeys, replies: list[Any]) -> Overview:
    time, counters, num_dead, queues, workers, models, leader, epoch, *more = replies
    settings, measures, num_delayed, num_at_front_door = more
    now = now_ms(time)
    return Overview(
        now_ms=now,
        limits=tuple(limits_of(settings, counters)),
        measures=measures,
        num_delayed=int(num_delayed),
        num_at_front_door=int(num_at_front_door),
        counters=stored_numbers(counters),
        notes=_notes(keys, counters, settings, epoch),
        num_dead_letters=int(num_dead),
        queue_names=tuple(sorted(map(stored_text, queues))),
        worker_ids=unexpired(now, workers),
        model_names=unexpired(now, models),
        scheduler_id=None if leader is None else stored_text(leader),
        scheduler_epoch=stored_number(epoch) or 0,
    )


def _notes(
    keys: ShardKeys,
    counters: Mapping[bytes, bytes],
    settings: Mapping[bytes, bytes],
    epoch: bytes | None,
) -> tuple[str, ...]:
    notes = [f"{keys.counters} cannot be read: {what}" for what in damaged_fields(counters)]
    if stored_number(epoch) is None:
        notes.append(f"{keys.epoch} is no number")
    return (*notes, *(f"invalid setting: {what}" for what in bad_settings(settings)))


def _rate(value: bytes | None) -> float:
    try:
        rate = float(value or 0.0)
    except ValueError:
        return 0.0
    return rate if math.isfinite(rate) else 0.0


def _readable(raw: bytes | None, kind: type[M]) -> M | None:
    try:
        return decode(raw, kind) if raw else None
    except ProtocolError:
        return None


def _status(seen: Overview, replies: list[Any]) -> Status:
    rest = iter(replies)
    num_overdue = int(next(rest))
    queues = [_queue(name, next(rest)) for name in seen.queue_names]
    infos = [next(rest) for _ in seen.worker_ids]
    reports = [next(rest) for _ in seen.worker_ids]
    cards = [next(rest) for _ in seen.model_names]
    queued, running = (_by_tenant(seen.counters, kind) for kind in ("q:", "r:"))
    return Status(
        num_queued=sum(queued.values()),
        num_running=sum(running.values()),
        num_delayed=seen.num_delayed,
        num_overdue=num_overdue,
        num_dead_letters=seen.num_dead_letters,
        num_at_front_door=seen.num_at_front_door,
        queued_bytes=seen.counters.get("qb", 0),
        max_bytes=stored_number(seen.measures.get(b"mb")) or 0,
        result_bytes=seen.counters.get("rb", 0),
        durability=stored_text(seen.measures.get(b"lv")) or UNKNOWN,
        jobs_per_second=_rate(seen.measures.get(b"rj")),
        backlog=Backlog.read(seen.measures.get(b"bk"), seen.now_ms),
        limits=seen.limits,
        queued_by_tenant=queued,
        running_by_tenant=running,
        queues=tuple(queues),
        workers=_workers(infos, reports),
        models=tuple(card for raw in cards if (card := _readable(raw, ModelCard))),
        scheduler_id=seen.scheduler_id,
        scheduler_epoch=seen.scheduler_epoch,
        notes=seen.notes,
    )


def _queue(name: str, length: int) -> QueueStatus:
    priority_class, _, tenant = name.partition(":")
    return QueueStatus(priority_class, tenant, int(length))


def _workers(infos: Sequence[Any], reports: Sequence[Any]) -> tuple[WorkerSnapshot, ...]:
    return tuple(
        WorkerSnapshot(info, _last_report(report))
        for raw, report in zip(infos, reports, strict=True)
        if (info := _readable(raw, WorkerInfo))
    )


def _last_report(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> WorkerStatus | None:
    return _readable(entries[0][1].get(b"s"), WorkerStatus) if entries else None


def _by_tenant(counters: dict[str, int], kind: str) -> dict[str, int]:
    return {
        name.removeprefix(kind): count
        for name, count in sorted(counters.items())
        if name.startswith(kind)
    }
