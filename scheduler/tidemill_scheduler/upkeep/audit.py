"""Forgets waiting jobs that wait no more, for nobody tells when one is cancelled in the queue."""

import asyncio
from collections.abc import Sequence

import redis.asyncio

from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.states import JobState
from tidemill_scheduler import metrics
from tidemill_scheduler.intake.ingress import Ingress
from tidemill_scheduler.policy.scheduler import Scheduler

_INTERVAL_SECONDS = 1.0
_BATCH = 256


class Audit:
    """Looks at all waiting jobs in turn, a few each second.

    Their dispatch would be refused in any case; but where no worker has room, or none serves the
    model, there would be none.
    """

    def __init__(
        self, client: redis.asyncio.Redis, keys: ShardKeys, scheduler: Scheduler, ingress: Ingress
    ) -> None:
        self._client = client
        self._keys = keys
        self._scheduler = scheduler
        self._ingress = ingress

    async def run(self) -> None:
        """Look for ever."""
        while True:
            job_ids = self._scheduler.waiting_ids
            for start in range(0, max(1, len(job_ids)), _BATCH):
                await asyncio.sleep(_INTERVAL_SECONDS)
                await self.check(job_ids[start : start + _BATCH])

    async def check(self, job_ids: Sequence[str]) -> int:
        """Forget those of the jobs that are not queued any more; returns how many were."""
        jobs = [job for job_id in job_ids if (job := self._scheduler.waiting_job(job_id))]
        if not jobs:
            return 0
        async with self._client.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.hget(self._keys.job(job.job_id), "st")
            states = await pipe.execute()
        ended = [
            job
            for job, state in zip(jobs, states, strict=True)
            # It may have gone out and come back while we looked: that is another pointer.
            if state != JobState.QUEUED.encode() and self._scheduler.waiting_job(job.job_id) is job
        ]
        for job in ended:
            self._scheduler.forget(job.job_id)
            await self._ingress.acknowledge(job.queue, job.entry_id)
        metrics.FORGOTTEN.inc(len(ended))
        return len(ended)
