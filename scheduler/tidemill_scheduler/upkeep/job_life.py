"""Lets delayed jobs run and ends those whose time is over."""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import cast

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.functions import run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import crash_point
from tidemill_scheduler import metrics
from tidemill_scheduler.clock import server_ms, this_moment
from tidemill_scheduler.fleet.grace import Grace
from tidemill_scheduler.upkeep.due_jobs import DueJob, find_due

_log = logging.getLogger(__name__)

#: Nobody rings for a job that was just delayed or given a deadline, so the indexes are looked at
#: this often; what they tell to be earlier is waited for exactly.
_MAX_WAIT_SECONDS = 0.25
#: Waking a little late costs nothing, waking early another look.
_MARGIN_SECONDS = 0.001

#: Reply of expire about a job that has moved to another worker since it was read.
_MOVED = "moved"


class JobLife:
    """Follows the indexes of delayed jobs and time limits; the functions re-check every job.

    ``forget`` is told each job that ended, wherever it was.  No job is called stalled before
    ``grace`` is over: while the server was away no worker could write a token.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        grace: Grace,
        forget: Callable[[str], object],
    ) -> None:
        self._client = client
        self._keys = keys
        self._grace = grace
        self._forget = forget

    async def run(self) -> None:
        """Follow them for ever."""
        while True:
            wait = await self._seconds_to_next()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            num_settled = await self.promote() + await self.expire()
            if not num_settled:
                await asyncio.sleep(_MAX_WAIT_SECONDS)

    async def promote(self) -> int:
        """Queue every delayed job whose time has come; returns how many."""
        num_promoted, now_ms = 0, await server_ms(self._client)
        while due := await find_due(self._client, self._keys, self._keys.delayed, now_ms):
            crash_point("scheduler.before_promote")
            batch = [
                calls.promote(self._keys, job_id=job.ref.job_id, queue=job.ref.queue) for job in due
            ]
            num_promoted += sum(
                reply is True for reply in await run_many_async(self._client, batch)
            )
            crash_point("scheduler.after_promote")
        metrics.PROMOTED.inc(num_promoted)
        return num_promoted

    async def expire(self) -> int:
        """End every job of which a time limit has passed; returns how many."""
        num_expired = 0
        while due := await self._find_expired():
            crash_point("scheduler.before_expire")
            batch = [calls.expire(self._keys, job.ref, worker_id=job.worker_id) for job in due]
            reasons = await run_many_async(self._client, batch)
            crash_point("scheduler.after_expire")
            for job, reason in zip(due, reasons, strict=True):
                # A job that moved is still due, and so is read again.
                if reason and reason != _MOVED:
                    num_expired += 1
                    self._note_end(job.ref.job_id, cast(str, reason))
        return num_expired

    async def _find_expired(self) -> list[DueJob]:
        now = await this_moment(self._client)
        due = await find_due(self._client, self._keys, self._keys.due, int(now.there * 1000))
        is_grace_over = self._grace.is_over(now)
        return [job for job in due if is_grace_over or not job.may_only_stall]

    def _note_end(self, job_id: str, reason: str) -> None:
        metrics.EXPIRED.labels(reason).inc()
        _log.info("%s expired: %s", job_id, reason)
        self._forget(job_id)

    async def _seconds_to_next(self) -> float:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.time()
            for index in (self._keys.delayed, self._keys.due):
                pipe.zrange(index, 0, 0, withscores=True)
            (seconds, microseconds), *heads = await pipe.execute()
        now: float = seconds + microseconds / 1e6
        scores: list[float] = [score for head in heads for _, score in head]
        due = min(scores, default=math.inf) / 1000
        return min(due - now + _MARGIN_SECONDS, _MAX_WAIT_SECONDS)
