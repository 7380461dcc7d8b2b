"""Cancelling many jobs, or all of a batch or a tenant, wherever they are; does no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tidemill._cancel import MOVED, cancel_call
from tidemill._plan import Plan
from tidemill._reads import Location, Read, located, now_ms
from tidemill.batch import CancelCounts
from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.states import JobState
from tidemill.protocol.stored import stored_number, stored_text

#: Jobs of one round trip.
_PAGE_SIZE = 256

#: Of the passes that find nothing, so many in a row end a sweep of a tenant: between two looks a
#: job may go from a place not yet searched to one that was.
_EMPTY_PASSES = 2

_CLASSES = ("p0", "p1", "p2")


class _Place(NamedTuple):
    location: Location
    submitted_ms: int


class _Page(NamedTuple):
    job_ids: list[str]
    cursor: str


@dataclass(slots=True)
class _Tally:
    cancelled: int = 0
    ended: int = 0

    @property
    def total(self) -> int:
        return self.cancelled + self.ended


def cancel_batch(keys: ShardKeys, tenant: str, batch: str) -> Plan[CancelCounts]:
    """Close a batch and cancel every job in it that has not ended."""
    yield [calls.close_batch(keys, tenant=tenant, batch=batch, state=JobState.CANCELLED)]
    tally, before = _Tally(), -1
    while tally.total > before:
        before = tally.total
        yield from _cancel_set(keys, ("SSCAN", keys.batch_members(tenant, batch)), tally, None)
    return CancelCounts(tally.cancelled, tally.ended)


def cancel_jobs(keys: ShardKeys, job_ids: Sequence[str]) -> Plan[CancelCounts]:
    """Cancel those of the jobs that are there and have not ended."""
    tally = _Tally()
    for start in range(0, len(job_ids), _PAGE_SIZE):
        yield from _cancel_jobs(keys, job_ids[start : start + _PAGE_SIZE], tally, None)
    return CancelCounts(tally.cancelled, tally.ended)


def cancel_tenant(keys: ShardKeys, tenant: str) -> Plan[CancelCounts]:
    """Cancel every job of a tenant that was submitted before now, by the server's clock."""
    wanted = _Wanted(tenant, (yield Read((("TIME",),), lambda replies: now_ms(replies[0]))))
    tally, num_empty = _Tally(), 0
    while num_empty < _EMPTY_PASSES:
        before = tally.total
        for index in (keys.running, keys.delayed):
            yield from _cancel_set(keys, ("ZSCAN", index), tally, wanted)
        for name in _CLASSES:
            yield from _cancel_queue(keys, keys.ingress(f"{name}:{tenant}"), tally, wanted)
        num_empty = num_empty + 1 if tally.total == before else 0
    return CancelCounts(tally.cancelled, tally.ended)


@dataclass(frozen=True, slots=True)
class _Wanted:
    tenant: str
    submitted_until_ms: int

    def includes(self, place: _Place) -> bool:
        is_ours = place.location.ref.tenant == self.tenant
        return is_ours and place.submitted_ms <= self.submitted_until_ms


def _cancel_set(
    keys: ShardKeys, scan: tuple[str, str], tally: _Tally, wanted: _Wanted | None
) -> Plan[None]:
    cursor = "0"
    while True:
        page: _Page = yield Read(
            ((*scan, cursor, "COUNT", _PAGE_SIZE),), lambda replies: _scanned(*replies)
        )
        yield from _cancel_jobs(keys, page.job_ids, tally, wanted)
        cursor = page.cursor
        if cursor == "0":
            return


def _cancel_queue(keys: ShardKeys, queue: str, tally: _Tally, wanted: _Wanted) -> Plan[None]:
    start = "-"
    while True:
        page: _Page = yield Read(
            (("XRANGE", queue, start, "+", "COUNT", _PAGE_SIZE),),
            lambda replies: _entries(*replies),
        )
        if not page.job_ids:
            return
        yield from _cancel_jobs(keys, page.job_ids, tally, wanted)
        start = f"({page.cursor}"


def _cancel_jobs(
    keys: ShardKeys, job_ids: Sequence[str], tally: _Tally, wanted: _Wanted | None
) -> Plan[None]:
    """Cancel what there is of ``job_ids``, following those that move to another worker."""
    while job_ids:
        places: list[_Place | None] = yield _places(keys, job_ids)
        found = [
            (job_id, place.location)
            for job_id, place in zip(job_ids, places, strict=True)
            if place is not None and (wanted is None or wanted.includes(place))
        ]
        replies = (yield [cancel_call(job_id, where) for job_id, where in found]) if found else []
        job_ids = list(_moved(found, replies, tally))


def _moved(
    found: Sequence[tuple[str, Location]], replies: Sequence[Any], tally: _Tally
) -> Iterator[str]:
    for (job_id, _), reply in zip(found, replies, strict=True):
        if isinstance(reply, TidemillError):
            raise reply
        code = reply[0]
        tally.cancelled += code == 1
        tally.ended += code == 0
        if code == MOVED:
            yield job_id


def _places(keys: ShardKeys, job_ids: Sequence[str]) -> Read[list[_Place | None]]:
    reads = tuple(("HMGET", keys.job(job_id), "w", "ts", *REF_FIELDS) for job_id in job_ids)
    return Read(
        reads, lambda replies: [_place(*pair) for pair in zip(job_ids, replies, strict=True)]
    )


def _place(job_id: str, values: Sequence[bytes | None]) -> _Place | None:
    worker, submitted, *reference = values
    if reference[0] is None:
        return None
    return _Place(located(job_id, worker, reference), stored_number(submitted) or 0)


def _scanned(reply: tuple[Any, Sequence[Any]]) -> _Page:
    cursor, members = reply
    # redis-py makes pairs of what ZSCAN replies.
    names = [member[0] if isinstance(member, tuple) else member for member in members]
    return _Page([stored_text(name) for name in names], _text(cursor))


def _entries(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> _Page:
    # Entries that nobody can read are the scheduler's to bury.
    ids = [fields.get(b"j", b"").decode("utf-8", "replace") for _, fields in entries]
    return _Page(ids, _text(entries[-1][0]) if entries else "")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
