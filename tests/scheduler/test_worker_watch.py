"""How workers become known."""

import time
from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.shard import KEYS
from support.waiting_jobs import make_job
from tidemill.service.redis import connect_async
from tidemill_scheduler.scheduler import Scheduler
from tidemill_scheduler.worker_watch import WorkerWatch


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


def age_status(worker: PuppetWorker, seconds: int) -> None:
    """Make the worker's only status look that old."""
    stream = KEYS.status(worker.worker_id)
    [(entry_id, fields)] = worker.client.xrange(stream)
    milliseconds = int(entry_id.partition(b"-")[0]) - 1000 * seconds
    worker.client.delete(stream)
    worker.client.xadd(stream, fields, id=f"{milliseconds}-0")
    worker.client.pexpire(stream, worker.lease_ms)


async def test_a_worker_that_is_found_silent_does_not_pass_for_a_lively_one(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    silent, lively = PuppetWorker(redis_client), PuppetWorker(redis_client)
    age_status(silent, 50)
    scheduler = Scheduler(silent_seconds=60.0)
    await WorkerWatch(client, KEYS, scheduler, lambda: None).refresh()
    for _ in range(4):
        scheduler.add_job(make_job(attempts=1))

    dispatches = scheduler.tick(time.monotonic())

    assert {dispatch.worker_id for dispatch in dispatches} == {lively.worker_id}


async def test_a_worker_that_is_found_silent_may_work_until_it_had_time_to_speak(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    silent = PuppetWorker(redis_client)
    age_status(silent, 500)
    scheduler = Scheduler(silent_seconds=60.0)
    await WorkerWatch(client, KEYS, scheduler, lambda: None).refresh()
    scheduler.add_job(make_job())
    now = time.monotonic()

    assert scheduler.tick(now + 31.0) == []
    assert len(scheduler.tick(now + 29.0)) == 1
