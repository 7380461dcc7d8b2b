"""Reads job pointers off the ingress streams, each exactly once per leader."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import redis.asyncio
from redis import exceptions

from tidemill.protocol import calls
from tidemill.protocol.calls import Entry, FencedReply, Fields, ReadError
from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.functions import run_async, run_many_async
from tidemill.protocol.keys import GROUP, ShardKeys
from tidemill.service.runtime import crash_point
from tidemill_scheduler import metrics
from tidemill_scheduler.intake.jobs import WaitingJob, entry_number, is_queue_name, parse_pointer

_log = logging.getLogger(__name__)

#: Bounds on one round trip, so that neither the server nor our loop stops for long.
_QUEUES_PER_READ = 64
_MAX_READ = 4000
_MAX_READ_OF_QUEUE = 1000


class Ingress:
    """Reads as the group's only consumer, in the name of one epoch.

    After any error the owner starts over with another instance, which reads what is pending first.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys, epoch: int) -> None:
        self._client = client
        self._keys = keys
        self._epoch = epoch
        # Our monotonic clock minus the server's, in seconds.
        self._clock_offset = 0.0
        # The last entry of each queue that this leader has read.
        self._positions: dict[str, str] = {}

    async def active_queues(self) -> list[str]:
        """Return the queues that have or had jobs, the longest waiting first."""
        names = await self._client.zrange(self._keys.active_queues, 0, -1)
        return _queue_names(cast(list[bytes], names))

    async def read(self, queues: Sequence[str]) -> list[WaitingJob]:
        """Return up to 1,000 pointers of each queue; none at all means that none is left.

        What an earlier leader read and did not dispatch comes first.  Raises ``StaleEpoch``, with
        nothing read, if another scheduler leads.
        """
        jobs: list[WaitingJob] = []
        for start in range(0, len(queues), _QUEUES_PER_READ):
            jobs += await self._read_some(queues[start : start + _QUEUES_PER_READ])
        if jobs:
            crash_point("scheduler.after_read")
        return await self._with_history(jobs)

    async def retire(self, queues: Sequence[str]) -> None:
        """Forget those of the queues that are empty."""
        batch = [calls.retire(self._keys, queue) for queue in queues]
        replies = await run_many_async(self._client, batch)
        for queue, retired in zip(queues, replies, strict=True):
            if retired is True:
                self._positions.pop(queue, None)

    async def acknowledge(self, queue: str, entry_id: str) -> None:
        """Remove a pointer whose job was cancelled, or has a newer one."""
        await run_async(self._client, calls.acknowledge(self._keys.ingress(queue), [entry_id]))

    async def _read_some(self, queues: Sequence[str]) -> list[WaitingJob]:
        reply = await self._read_fenced(queues)
        jobs: list[WaitingJob] = []
        for queue, entries in zip(queues, reply.entries, strict=True):
            if isinstance(entries, ReadError):
                await self._repair(queue, entries)
                continue
            if entries:
                self._positions[queue] = entries[-1][0].decode()
            jobs += await self._parse(queue, entries)
        return jobs

    async def _read_fenced(self, queues: Sequence[str]) -> FencedReply:
        positions = {self._keys.ingress(q): self._positions.get(q, "0") for q in queues}
        count = min(_MAX_READ_OF_QUEUE, _MAX_READ // len(queues))
        call = calls.read(self._keys, epoch=self._epoch, positions=positions, count=count)
        reply = await run_async(self._client, call)
        self._clock_offset = time.monotonic() - reply.now_ms / 1000
        return reply

    async def _parse(self, queue: str, entries: Sequence[Entry]) -> list[WaitingJob]:
        jobs = []
        for entry_id, fields in entries:
            # A pending entry that was deleted: its job was cancelled.
            if fields is None:
                await self.acknowledge(queue, entry_id.decode())
                continue
            try:
                jobs.append(self._waiting_job(queue, entry_id.decode(), fields))
            except MalformedMessage as error:
                await self._bury(queue, entry_id.decode(), fields, error)
        return jobs

    def _waiting_job(self, queue: str, entry_id: str, fields: Fields) -> WaitingJob:
        # So a new leader knows for how long jobs have waited already.
        written_ms, _ = entry_number(entry_id)
        since = min(time.monotonic(), written_ms / 1000 + self._clock_offset)
        offset = self._clock_offset
        return parse_pointer(self._keys.shard, queue, entry_id, fields, since, offset)

    async def _with_history(self, jobs: list[WaitingJob]) -> list[WaitingJob]:
        # The pointer does not tell, and only jobs that were tried before have one.
        tried = [job for job in jobs if job.attempts]
        if not tried:
            return jobs
        async with self._client.pipeline(transaction=False) as pipe:
            for job in tried:
                pipe.hmget(self._keys.job(job.job_id), "cr", "w")
            values = dict(zip((job.job_id for job in tried), await pipe.execute(), strict=True))
        return [_with_past(job, *values.get(job.job_id, (None, None))) for job in jobs]

    async def _bury(
        self, queue: str, entry_id: str, fields: Fields, error: MalformedMessage
    ) -> None:
        metrics.MALFORMED.inc()
        _log.warning("entry %s of queue %s is malformed: %s", entry_id, queue, error.message)
        call = calls.bury(
            self._keys,
            queue=queue,
            entry_id=entry_id,
            job_id=fields.get(b"j", b"")[:256],
            reason=f"malformed pointer: {error.message}",
        )
        await run_async(self._client, call)

    async def _repair(self, queue: str, error: ReadError) -> None:
        if not error.message.startswith("NOGROUP"):
            _log.warning("queue %s cannot be read: %s", queue, error.message)
            return
        # The stream was retired meanwhile, or lost its group with a server's data.
        self._positions.pop(queue, None)
        stream = self._keys.ingress(queue)
        if await self._client.exists(stream):
            _log.warning("queue %s has no consumer group; making it", queue)
            try:
                await self._client.xgroup_create(stream, GROUP, id="0")
            except exceptions.ResponseError as refusal:
                _log.info("queue %s: %s", queue, refusal)


def _queue_names(names: Iterable[bytes]) -> list[str]:
    decoded = (name.decode("utf-8", "replace") for name in names)
    return [name for name in decoded if is_queue_name(name)]


def _with_past(job: WaitingJob, crashes: bytes | None, worker: bytes | None) -> WaitingJob:
    last_worker = (worker or b"").decode("utf-8", "replace")
    return replace(job, crashes=int(crashes or 0), last_worker=last_worker)
