"""Jobs that were cancelled while the scheduler held them."""

from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.shard import KEYS, QUEUE, cancel, lead, submit
from tidemill.service.redis import connect_async
from tidemill_scheduler.audit import Audit
from tidemill_scheduler.ingress import Ingress
from tidemill_scheduler.scheduler import Scheduler


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


async def test_a_job_that_is_waiting_again_by_now_is_kept(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)
    scheduler = Scheduler(silent_seconds=60.0)
    ingress = Ingress(client, KEYS, lead(redis_client))
    [job] = await ingress.read([QUEUE])
    audit = Audit(client, KEYS, scheduler, ingress)

    assert await audit.check([job_id]) == 0
    scheduler.add_job(job)
    assert await audit.check([job_id]) == 0

    assert scheduler.waiting_ids == [job_id]
    worker = PuppetWorker(redis_client)
    assert worker.job_ids == []
    cancel(redis_client, job_id)
