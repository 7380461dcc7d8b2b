"""Gives the jobs of dead workers back to the queue."""

import asyncio
import logging
from typing import Any, cast

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.calls import MAX_CRASHES, JobRef
from tidemill.protocol.errors import BrokerUnavailable
from tidemill.protocol.functions import Call, run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.states import FinishReason, JobState
from tidemill.service.runtime import crash_point
from tidemill_scheduler import metrics
from tidemill_scheduler.clock import this_moment
from tidemill_scheduler.fleet.grace import Grace, Moment
from tidemill_scheduler.upkeep.due_jobs import find_due

_log = logging.getLogger(__name__)

#: Passes in the length of one lease; each is also a contact that the grace counts from.
_PASSES_PER_LEASE = 16

_OUTCOMES = {0: "not_running", 1: "requeued", 2: "dead"}
_POISONED = JobEnd(
    state=JobState.DEAD,
    finish_reason=FinishReason.ERROR,
    error=f"the job ended {MAX_CRASHES} workers in a row without producing a token",
)


class Reaper:
    """Requeues jobs whose lease ran out; the server's clock decides, and the function re-checks."""

    def __init__(
        self, client: redis.asyncio.Redis, keys: ShardKeys, grace: Grace, lease_seconds: float
    ) -> None:
        self._client = client
        self._keys = keys
        self._grace = grace
        self._pass_seconds = lease_seconds / _PASSES_PER_LEASE
        self._run_id = ""

    async def begin(self) -> None:
        """Note that the server is there again, before anybody asks whether the grace is over."""
        self._run_id = await self._ask_run_id()
        self._grace.resume(self._run_id, await this_moment(self._client))

    async def run(self) -> None:
        """Reap for ever, once the workers have had time to beat; ``begin`` comes first.

        Raises ``BrokerUnavailable`` once another server process answers.
        """
        while True:
            if await self._ask_run_id() != self._run_id:
                raise BrokerUnavailable("the broker was replaced by another process")
            now = await this_moment(self._client)
            wait = self._grace.lacks(now)
            if wait <= 0:
                await self.reap(now)
                wait = self._pass_seconds
            await asyncio.sleep(min(wait, self._pass_seconds))

    async def reap(self, now: Moment) -> int:
        """Requeue or end every job that was due at a moment; returns how many were."""
        num_reaped, now_ms = 0, int(now.there * 1000)
        while expired := await find_due(self._client, self._keys, self._keys.running, now_ms):
            crash_point("scheduler.before_reap")
            batch = [self._call(job.ref) for job in expired]
            outcomes = await run_many_async(self._client, batch)
            crash_point("scheduler.after_reap")
            for job, outcome in zip(expired, outcomes, strict=True):
                name = _OUTCOMES[cast(int, outcome)]
                metrics.REAPED.labels(name).inc()
                _log.info("the lease of %s ran out: %s", job.ref.job_id, name)
            num_reaped += len(expired)
        return num_reaped

    def _call(self, job: JobRef) -> Call[int]:
        return calls.reap(self._keys, job, end=_POISONED)

    async def _ask_run_id(self) -> str:
        info: dict[str, Any] = await self._client.info("server")
        return str(info.get("run_id"))
