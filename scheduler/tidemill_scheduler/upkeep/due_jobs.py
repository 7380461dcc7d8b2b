"""Finds the jobs of an index whose time has come, by the server's clock."""

from dataclasses import dataclass
from typing import cast

import redis.asyncio

from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.states import JobState

#: Jobs of one round trip: the server serves nobody else while it works them off.
MAX_BATCH = 256


@dataclass(frozen=True, slots=True)
class DueJob:
    """A job that is due, and the worker that had it last, empty if none had.

    ``may_only_stall`` tells that of its time limits just its stall timeout can have passed.
    """

    ref: JobRef
    worker_id: str
    may_only_stall: bool


async def find_due(
    client: redis.asyncio.Redis, keys: ShardKeys, index: str, now: int
) -> list[DueJob]:
    """Return the jobs of ``index`` that were due first; 256 at most.

    The index is a sorted set by ms; ``now`` is what the server's clock said, in ms.
    """
    ids = await client.zrangebyscore(index, "-inf", now, start=0, num=MAX_BATCH)
    job_ids = [job_id.decode("utf-8", "replace") for job_id in cast(list[bytes], ids)]
    async with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(keys.job(job_id), *REF_FIELDS, "w", "st", "dl")
        rows = cast(list[list[bytes | None]], await pipe.execute())
    return [_due_job(job_id, row, now) for job_id, row in zip(job_ids, rows, strict=True)]


def _due_job(job_id: str, row: list[bytes | None], now: int) -> DueJob:
    *reference, worker, state, deadline = row
    is_over = 0 < _ms(deadline) <= now
    return DueJob(
        JobRef.read(job_id, reference),
        (worker or b"").decode("utf-8", "replace"),
        may_only_stall=state == JobState.RUNNING.encode() and not is_over,
    )


def _ms(value: bytes | None) -> int:
    # One damaged job must not keep those behind it waiting; the functions read it as none, too.
    return int(value) if value is not None and value.isdigit() and len(value) < 20 else 0
