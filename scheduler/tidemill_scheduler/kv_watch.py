"""Follows what workers' prefix caches hold: events of their status streams, and snapshots."""

import logging
import time
from collections.abc import AsyncIterator
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

    seq: int = 0
    is_lost: bool = True
    lacks: int = 0
    due: float | None = 0.0
    read_at: float = float("-inf")
    has_complained: bool = False


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

    @property
    def is_due(self) -> bool:
        """Whether ``recover`` has something to do now."""
        return bool(self._due())

    def add(self, worker_id: str) -> None:
        """Follow a worker; what its cache holds already is read by the next ``recover``."""
        self._caches[worker_id] = _Cache()

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        self._caches.pop(worker_id, None)

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
        """Read caches anew that are new or have a gap, a bounded number of them."""
        for worker_id in self._due()[:_MAX_AT_ONCE]:
            self._caches[worker_id].read_at = time.monotonic()
            self._caches[worker_id].due = self._caches[worker_id].read_at + _RETRY_SECONDS
            try:
                await self._recover(worker_id)
            except ResponseError as error:
                self._complain(worker_id, str(error))

    def _due(self) -> list[str]:
        now = time.monotonic()
        due = ((w, cache.due) for w, cache in self._caches.items())
        return [worker_id for worker_id, at in due if at is not None and at <= now]

    async def _recover(self, worker_id: str) -> None:
        data = await self._client.get(self._keys.kv_snapshot(worker_id))
        snapshot = self._decode(worker_id, cast(bytes, data), KvSnapshot) if data else None
        cache = self._caches.get(worker_id)
        if cache is None or not (cache.is_lost or (snapshot and snapshot.seq >= cache.lacks)):
            return
        tail = await self._read_tail(worker_id, snapshot)
        # It may have been removed meanwhile.
        if self._caches.get(worker_id) is cache:
            self._begin(worker_id, cache, snapshot, tail)

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

    def _begin(
        self,
        worker_id: str,
        cache: _Cache,
        snapshot: KvSnapshot | None,
        tail: list[KvEvents],
    ) -> None:
        start, is_complete = _start_of(snapshot, tail)
        cache.is_lost, cache.seq = False, start.seq
        cache.lacks = 0 if is_complete else start.seq
        if is_complete:
            cache.due = None
        # A worker that has told nothing of its cache is left to guesses.
        if snapshot is not None or tail:
            self._scheduler.reset_kv(worker_id, start)
        for events in tail:
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
        cache = self._caches.get(worker_id)
        if cache is not None and not cache.has_complained:
            cache.has_complained = True
            _log.warning("the cache of worker %s cannot be followed: %s", worker_id, reason)


def _start_of(snapshot: KvSnapshot | None, tail: list[KvEvents]) -> tuple[KvSnapshot, bool]:
    """Return what is known before the tail, and whether that is all there was."""
    if snapshot is not None and (not tail or tail[0].seq <= snapshot.seq + 1):
        return snapshot, True
    first = tail[0].seq if tail else 1
    return KvSnapshot(seq=first - 1), first == 1
