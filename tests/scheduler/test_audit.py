"""Jobs that were cancelled while the scheduler held them."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis
import redis.asyncio

from support.shard import KEYS, QUEUE, cancel, dispatch, finish, lead, submit
from tidemill.service.redis import connect_async
from tidemill_scheduler.intake.ingress import Ingress
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.upkeep.audit import Audit

#: Entry id of the pointer that a job comes back with.
NEWER = "9999999999999-0"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


async def test_cancelled_and_lost_jobs_leave_the_order(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    kept, cancelled, lost = (submit(redis_client) for _ in range(3))
    scheduler = Scheduler(silent_seconds=60.0)
    ingress = Ingress(client, KEYS, lead(redis_client))
    for job in await ingress.read([QUEUE]):
        scheduler.add_job(job)
    audit = Audit(client, KEYS, scheduler, ingress)
    cancel(redis_client, cancelled)
    redis_client.delete(KEYS.job(lost))

    assert await audit.check(scheduler.waiting_ids) == 2

    assert scheduler.waiting_ids == [kept]
    assert redis_client.xpending(KEYS.ingress(QUEUE), "sched")["pending"] == 1
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1
    cancel(redis_client, kept)


class Returning(Scheduler):
    """Gets a newer pointer of each job in place of the one that was asked for."""

    def waiting_job(self, job_id: str) -> WaitingJob | None:
        """Return the job as it was when it was asked for."""
        asked_for = super().waiting_job(job_id)
        if asked_for is not None and asked_for.entry_id != NEWER:
            self.forget(job_id)
            self.add_job(replace(asked_for, entry_id=NEWER))
        return asked_for


async def test_a_job_that_is_waiting_again_by_now_is_kept(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)
    scheduler = Returning(silent_seconds=60.0)
    ingress = Ingress(client, KEYS, epoch := lead(redis_client))
    [job] = await ingress.read([QUEUE])
    scheduler.add_job(job)
    # It goes out before the look at its state, and comes back before the answer.
    fence = dispatch(redis_client, job_id, epoch).fence

    assert await Audit(client, KEYS, scheduler, ingress).check([job_id]) == 0

    [kept] = [scheduler.waiting_job(waiting) for waiting in scheduler.waiting_ids]
    assert kept is not None
    assert (kept.job_id, kept.entry_id) == (job_id, NEWER)
    assert finish(redis_client, job_id, fence, 0).accepted
