"""Follows what workers' prefix caches hold: events of their status streams, and snapshots."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import redis.asyncio
from pydantic import BaseModel
from redis.exceptions import ResponseError

from tidemill.protocol.codec import MAX_MESSAGE_BYTES, MAX_RESULT_BYTES, decode
from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import KvEvents, KvSnapshot
from tidemill_scheduler import metrics
from tidemill_scheduler.policy.scheduler import Scheduler

_log = logging.getLogger(__name__)

#: Id and fields of an entry of a status stream.
_Entry = tuple[bytes, dict[bytes, bytes]]

#: Entries of one read of a stream's end.
_PAGE = 100
#: Caches that are read anew in a row, so that statuses do not wait for all of them.
_MAX_AT_ONCE = 16
#: A cache is read anew this often at most, whatever its worker writes.
_RETRY_SECONDS = 5.0

M = TypeVar("M", bound=BaseModel)


@dataclass(slots=True)
class _Cache:
    """What is known of one worker's cache: everything up to the batch ``seq``.

    A lost one takes no events until it is read anew.  One that ``lacks`` something knows only what
    batches after that one changed.  ``due`` is when to read it anew, None for never.
    """

    read_at: float
    seq: int = 0
    is_lost: bool = False
    lacks: int = 0
    due: float | None = None


@dataclass(frozen=True, slots=True)
class CacheView:
    """What Redis tells of a cache: the last snapshot, and the last batches without a gap."""

    snapshot: KvSnapshot | None = None
    tail: Sequence[KvEvents] = ()


class KvWatch:
    """Keeps the scheduler's view of each worker's cache complete, or empty where it cannot be.

    What is claimed of a cache must be there: where events are missing the view begins with the
    snapshot before them or, if that is too old, with nothing.  Whatever a worker writes raises
    nothing and is logged once.  Not for use by two tasks at a time.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys, scheduler: Scheduler) -> None:
        self._client = client
        self._keys = keys
        self._scheduler = scheduler
        self._caches: dict[str, _Cache] = {}
        self._complained: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Whether ``recover`` has something to do now."""
        return bool(self._due())

    async def look(self, worker_id: str) -> CacheView:
        """Read what a worker's cache holds."""
        try:
            snapshot = await self._read_snapshot(worker_id)
            return CacheView(snapshot, await self._read_tail(worker_id, snapshot))
        except ResponseError as error:
            self._complain(worker_id, str(error))
            return CacheView()

    def add(self, worker_id: str, view: CacheView) -> None:
        """Follow a worker that the scheduler knows, from a view of its cache on."""
        cache = self._caches[worker_id] = _Cache(time.monotonic())
        self._begin(worker_id, cache, view)

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        self._caches.pop(worker_id, None)
        self._complained.discard(worker_id)

    def take(self, worker_id: str, data: bytes) -> None:
        """Take in the events of the next entry of a worker's status stream."""
        cache = self._caches.get(worker_id)
        # A lost one finds them in the stream when it is read anew.
        if cache is None or cache.is_lost:
            return
        events = self._decode(worker_id, data, KvEvents)
        if events is None or not self._apply(worker_id, cache, events):
            metrics.KV_GAPS.inc()
            cache.is_lost, cache.due = True, cache.read_at + _RETRY_SECONDS

    async def recover(self) -> None:
        """Read caches anew that have a gap, a bounded number of them."""
        for worker_id in self._due()[:_MAX_AT_ONCE]:
            cache = self._caches.get(worker_id)
            if cache is not None:
                cache.read_at = time.monotonic()
                cache.due = cache.read_at + _RETRY_SECONDS
                await self._recover(worker_id, cache)

    def _due(self) -> list[str]:
        now = time.monotonic()
        due = ((w, cache.due) for w, cache in self._caches.items())
        return [worker_id for worker_id, at in due if at is not None and at <= now]

    async def _recover(self, worker_id: str, cache: _Cache) -> None:
        view = await self.look(worker_id)
        is_of_use = cache.is_lost or (view.snapshot and view.snapshot.seq >= cache.lacks)
        # It may have been removed meanwhile.
        if is_of_use and self._caches.get(worker_id) is cache:
            self._begin(worker_id, cache, view)

    async def _read_snapshot(self, worker_id: str) -> KvSnapshot | None:
        data = cast(bytes | None, await self._client.get(self._keys.kv_snapshot(worker_id)))
        return self._decode(worker_id, data, KvSnapshot) if data else None

    async def _read_tail(self, worker_id: str, snapshot: KvSnapshot | None) -> list[KvEvents]:
        """Return the last batches without a gap, oldest first, from the snapshot on if possible."""
        tail: list[KvEvents] = []
        async for data in self._backwards(worker_id, bounded=snapshot is None):
            events = self._decode(worker_id, data, KvEvents)
            if events is None or (tail and not tail[-1].seq - 1 <= events.seq <= tail[-1].seq):
                break
            # A worker that missed the reply to a report has written it twice.
            tail.append(events)
            if snapshot is not None and events.seq <= snapshot.seq + 1:
                break
        return tail[::-1]

    async def _backwards(self, worker_id: str, *, bounded: bool) -> AsyncIterator[bytes]:
        """Yield the events of a status stream, newest first; ``bounded`` of one page only."""
        end, stream = "+", self._keys.status(worker_id)
        while page := cast(list[_Entry], await self._client.xrevrange(stream, end, count=_PAGE)):
            for _, fields in page:
                if b"k" in fields:
                    yield fields[b"k"]
            if bounded:
                break
            end = f"({page[-1][0].decode()}"

    def _begin(self, worker_id: str, cache: _Cache, view: CacheView) -> None:
        start, is_complete = _start_of(view)
        cache.is_lost, cache.seq = False, start.seq
        cache.lacks = 0 if is_complete else start.seq
        cache.due = None if is_complete else cache.read_at + _RETRY_SECONDS
        # A worker that has told nothing of its cache is left to guesses.
        if view.snapshot is not None or view.tail:
            self._scheduler.reset_kv(worker_id, start)
        for events in view.tail:
            self._apply(worker_id, cache, events)

    def _apply(self, worker_id: str, cache: _Cache, events: KvEvents) -> bool:
        """Take in a batch, unless it is known; false if something before it is missing."""
        if events.seq <= cache.seq:
            return True
        if events.seq > cache.seq + 1 or not self._scheduler.apply_kv(worker_id, events):
            return False
        cache.seq = events.seq
        return True

    def _decode(self, worker_id: str, data: bytes, model: type[M]) -> M | None:
        max_bytes = MAX_RESULT_BYTES if model is KvSnapshot else MAX_MESSAGE_BYTES
        try:
            return decode(data, model, max_bytes=max_bytes)
        except ProtocolError as error:
            self._complain(worker_id, error.message)
            return None

    def _complain(self, worker_id: str, reason: str) -> None:
        if worker_id not in self._complained:
            self._complained.add(worker_id)
            _log.warning("the cache of worker %s cannot be followed: %s", worker_id, reason)


def _start_of(view: CacheView) -> tuple[KvSnapshot, bool]:
    """Return what is known before the tail, and whether that is all there was."""
    snapshot, tail = view.snapshot, view.tail
    if snapshot is not None and (not tail or tail[0].seq <= snapshot.seq + 1):
        return snapshot, True
    first = tail[0].seq if tail else 1
    return KvSnapshot(seq=first - 1), first == 1
