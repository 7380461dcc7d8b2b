"""Keeps the scheduler's picture of the workers up to date."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import redis.asyncio

from tidemill.protocol.codec import decode
from tidemill.protocol.errors import MalformedMessage, ProtocolError
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler import metrics
from tidemill_scheduler.clock import server_ms
from tidemill_scheduler.fleet.kv_watch import KvWatch
from tidemill_scheduler.intake.jobs import entry_number
from tidemill_scheduler.policy.scheduler import Scheduler

_log = logging.getLogger(__name__)

#: How soon a new worker is seen, at the latest.
_REFRESH_SECONDS = 0.5
#: A blocking read sees workers that registered after it began only when it returns.
_BLOCK_MS = 250
#: Entries of one worker in one read: none is left out, and nobody waits long for one's backlog.
_READ_COUNT = 128
#: A read that does not block; 0 would be for ever.
_NO_BLOCK_MS = 1
#: How long the id of a dead worker is kept, for people who look.
_FORGET_MS = 60_000

_Entry = tuple[bytes, dict[bytes, bytes]]


class WorkerWatch:
    """Registers live workers with the scheduler, feeds it all they say, removes dead ones.

    Of what a worker said before it was registered only its newest status counts, and its cache.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        scheduler: Scheduler,
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._keys = keys
        self._scheduler = scheduler
        self._changed = changed
        # Worker id -> last status entry read.
        self._cursors: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._confused: set[str] = set()
        self._caches = KvWatch(client, keys, scheduler)
        self._refreshing = asyncio.Lock()

    async def run(self) -> None:
        """Follow the registry for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(_REFRESH_SECONDS)

    async def follow_statuses(self) -> None:
        """Follow the status streams, and the caches that they tell of, for ever."""
        while True:
            await self._caches.recover()
            if self._cursors:
                await self._read_statuses()
            else:
                await asyncio.sleep(_REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Add workers whose heartbeat is fresh, remove those whose heartbeat expired."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        now = await server_ms(self._client)
        ids = await self._client.zrangebyscore(self._keys.workers, now, "+inf")
        alive = {worker_id.decode("utf-8", "replace") for worker_id in cast(list[bytes], ids)}
        for worker_id in self._scheduler.worker_ids - alive:
            self._remove(worker_id)
        self._unreadable &= alive
        for worker_id in sorted(alive - self._scheduler.worker_ids - self._unreadable):
            await self._add(worker_id, now)
        metrics.WORKERS.set(len(self._scheduler.worker_ids))
        await self._client.zremrangebyscore(self._keys.workers, "-inf", now - _FORGET_MS)

    async def _add(self, worker_id: str, now: int) -> None:
        data = await self._client.hget(self._keys.worker_info(worker_id), "info")
        if data is None:
            return
        try:
            info = _parse_info(worker_id, cast(bytes, data))
        except ProtocolError as error:
            self._unreadable.add(worker_id)
            _log.warning("worker %s cannot be used: %s", worker_id, error.message)
            return
        last = cast(
            list[_Entry], await self._client.xrevrange(self._keys.status(worker_id), count=1)
        )
        # Known before the worker gets its first job, and after the entry that is read on from.
        view = await self._caches.look(worker_id)
        # It may have been silent for long; it gets the time to say something all the same.
        silence = min(_age_seconds(last, now), self._scheduler.fresh_seconds)
        heard_at = time.monotonic() - silence
        self._scheduler.add_worker(info, heard_at)
        self._cursors[worker_id] = "0-0"
        self._caches.add(worker_id, view)
        _log.info("worker %s serves %s", worker_id, info.model)
        self._take_in(worker_id, last, heard_at)
        self._changed()

    def _remove(self, worker_id: str) -> None:
        _log.warning("worker %s stopped beating", worker_id)
        self._scheduler.remove_worker(worker_id)
        self._caches.remove(worker_id)
        self._confused.discard(worker_id)
        del self._cursors[worker_id]

    async def _read_statuses(self) -> None:
        streams = {self._keys.status(w): cursor for w, cursor in self._cursors.items()}
        names = {stream.encode(): w for w, stream in zip(self._cursors, streams, strict=True)}
        block = _NO_BLOCK_MS if self._caches.is_due else _BLOCK_MS
        reply = await self._client.xread(cast(Any, streams), count=_READ_COUNT, block=block)
        for stream, entries in cast(list[tuple[bytes, list[_Entry]]], reply or []):
            self._take_in(names[stream], entries, time.monotonic())
            # So that others on this loop wait for one worker's entries at most.
            await asyncio.sleep(0)
        if reply:
            self._changed()

    def _take_in(self, worker_id: str, entries: Sequence[_Entry], heard_at: float) -> None:
        # The worker may have been removed during the read.
        if worker_id not in self._cursors:
            return
        for entry_id, fields in entries:
            self._cursors[worker_id] = entry_id.decode()
            # Blocks are known to be there before the jobs that computed them are known to be done.
            if b"k" in fields:
                self._caches.take(worker_id, fields[b"k"])
            self._update(worker_id, fields.get(b"s", b""), heard_at)

    def _update(self, worker_id: str, data: bytes, heard_at: float) -> None:
        try:
            status = decode(data, WorkerStatus)
            self._scheduler.update_worker(worker_id, status, heard_at)
        except ProtocolError as error:
            if worker_id not in self._confused:
                self._confused.add(worker_id)
                _log.warning("status of worker %s is malformed: %s", worker_id, error.message)


def _age_seconds(last: Sequence[_Entry], now: int) -> float:
    """Seconds from the newest entry to ``now``, the server's time in ms; 0 without entries."""
    if not last:
        return 0.0
    milliseconds, _ = entry_number(last[0][0].decode())
    return max(0.0, (now - milliseconds) / 1000)


def _parse_info(worker_id: str, data: bytes) -> WorkerInfo:
    info = decode(data, WorkerInfo)
    if info.worker_id != worker_id:
        raise MalformedMessage(f"worker_id: it calls itself {info.worker_id!r}")
    return info
