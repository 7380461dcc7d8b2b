"""Ends jobs whose prompts no worker can hold."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import redis.asyncio

from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.errors import InvalidRequest, TidemillError
from tidemill.protocol.functions import run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill_scheduler.fleet.attention import Attention
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.upkeep.refusal import refuse

#: Turns in the length of the patience, and how much of it may pass between two.
_TURNS = 8
_MAX_GAP = 1 / 4


class Judge:
    """Refuses jobs that have been too large for all workers for so long, while it watched.

    ``refresh`` brings the list of workers up to date: none that came during a pause of ours may be
    overlooked.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        scheduler: Scheduler,
        refresh: Callable[[], Awaitable[None]],
        *,
        epoch: int,
        patience_seconds: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._scheduler = scheduler
        self._refresh = refresh
        self._epoch = epoch
        self._patience = patience_seconds
        self._attention = Attention(patience_seconds * _MAX_GAP)

    async def run(self) -> None:
        """Judge for ever.  Raises ``StaleEpoch``."""
        while True:
            await self.judge()
            await asyncio.sleep(self._patience / _TURNS)

    async def judge(self) -> int:
        """Look once, to be called at short intervals; returns how many jobs were refused."""
        now = time.monotonic()
        found = self._scheduler.find_hopeless(now, self._patience)
        if self._attention.look(now) < self._patience or not found:
            return 0
        refs = await self._load_refs([job for job, _ in found])
        await self._refresh()
        if self._attention.is_broken(time.monotonic()):
            return 0
        still = self._scheduler.find_hopeless(now, self._patience)
        hopeless = [(job, capacity) for job, capacity in still if job.job_id in refs]
        for job, _ in hopeless:
            self._scheduler.remove_job(job.job_id)
        batch = [
            refuse(self._keys, refs[job.job_id], _too_large(job, capacity), epoch=self._epoch)
            for job, capacity in hopeless
        ]
        for reply in await run_many_async(self._client, batch):
            if isinstance(reply, TidemillError):
                raise reply
        return len(hopeless)

    async def _load_refs(self, jobs: Sequence[WaitingJob]) -> dict[str, JobRef]:
        async with self._client.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.hmget(self._keys.job(job.job_id), REF_FIELDS)
            values = await pipe.execute()
        return {
            job.job_id: JobRef.read(job.job_id, reference)
            for job, reference in zip(jobs, values, strict=True)
        }


def _too_large(job: WaitingJob, capacity: int) -> InvalidRequest:
    return InvalidRequest(
        f"prompt: {job.cost} tokens are more than any worker of model {job.model!r} can hold;"
        f" the largest KV cache holds {capacity}",
        field="prompt",
        fix="Shorten the prompt, or give a worker more memory.",
    )
