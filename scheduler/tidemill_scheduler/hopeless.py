"""Ends jobs whose prompts no worker can hold."""

import time

import redis.asyncio

from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.functions import run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.refusal import refuse
from tidemill_scheduler.scheduler import Scheduler


async def refuse_hopeless(
    client: redis.asyncio.Redis, keys: ShardKeys, scheduler: Scheduler, patience_seconds: float
) -> None:
    """Let those fail that have been too large for all workers for so long; a bounded number."""
    hopeless = scheduler.take_hopeless(time.monotonic(), patience_seconds)
    if not hopeless:
        return
    async with client.pipeline(transaction=False) as pipe:
        for job, _ in hopeless:
            pipe.hmget(keys.job(job.job_id), REF_FIELDS)
        values = await pipe.execute()
    batch = [
        refuse(keys, JobRef.read(job.job_id, reference), _too_large(job, capacity))
        for (job, capacity), reference in zip(hopeless, values, strict=True)
    ]
    await run_many_async(client, batch)


def _too_large(job: WaitingJob, capacity: int) -> InvalidRequest:
    return InvalidRequest(
        f"prompt: {job.cost} tokens are more than any worker of model {job.model!r} can hold;"
        f" the largest KV cache holds {capacity}",
        field="prompt",
        fix="Shorten the prompt, or give a worker more memory.",
    )
