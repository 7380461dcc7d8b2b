"""How workers become known."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import redis
import redis.asyncio

from support.caching_worker import CachingWorker
from support.known_caches import CacheRecorder
from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS
from support.shard import KEYS
from support.wait import wait_until_async
from support.waiting_jobs import make_job
from tidemill.service.redis import connect_async
from tidemill_scheduler.fleet.worker_watch import WorkerWatch
from tidemill_scheduler.policy.scheduler import Scheduler


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
    now = time.monotonic()
    scheduler.add_job(make_job())
    assert len(scheduler.tick(now + 29.0)) == 1

    scheduler.add_job(make_job())
    assert scheduler.tick(now + 31.0) == []


@asynccontextmanager
async def watching(
    client: redis.asyncio.Redis, scheduler: CacheRecorder
) -> AsyncIterator[WorkerWatch]:
    """Watch as a leader does."""
    watch = WorkerWatch(client, KEYS, scheduler, lambda: None)
    await watch.refresh()
    task = asyncio.create_task(watch.follow_statuses())
    try:
        yield watch
        assert not task.done(), "it must go on whatever workers write"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def knows(scheduler: CacheRecorder, workers: list[CachingWorker]) -> bool:
    return scheduler.caches == {worker.worker_id: worker.held for worker in workers}


async def test_every_status_counts_however_many_come_at_once(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    worker, scheduler = PuppetWorker(redis_client), CacheRecorder()
    async with watching(client, scheduler):
        pipeline = redis_client.pipeline()
        for number in range(300):
            worker.client = pipeline
            worker.report(generated_tokens=number)
        pipeline.execute()
        heard = scheduler.statuses[worker.worker_id]
        await wait_until_async(lambda: len(heard) == 301, LIVENESS_SECONDS)

    assert [status.generated_tokens for status in heard] == [0, *range(300)]


async def test_a_new_leader_learns_what_caches_hold_already(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    puppets = [PuppetWorker(redis_client) for _ in range(3)]
    workers = [CachingWorker(redis_client, puppet.worker_id, period=4) for puppet in puppets]
    for number in range(40):
        for offset, worker in enumerate(workers):
            worker.change({bytes([offset, number]) * 4}, {bytes([offset, number // 2]) * 4})
    assert all(worker.held for worker in workers)

    for _ in range(2):
        scheduler = CacheRecorder()
        async with watching(client, scheduler):
            await wait_until_async(partial(knows, scheduler, workers), LIVENESS_SECONDS)
            workers[0].change({b"a new one"[:8]})
            await wait_until_async(partial(knows, scheduler, workers), LIVENESS_SECONDS)


async def test_a_worker_that_dies_and_comes_back_is_followed_anew(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    puppet, scheduler = PuppetWorker(redis_client), CacheRecorder()
    worker = CachingWorker(redis_client, puppet.worker_id)
    worker.change({b"12345678"})
    async with watching(client, scheduler) as watch:
        await wait_until_async(lambda: scheduler.caches, LIVENESS_SECONDS)
        redis_client.zadd(KEYS.workers, {puppet.worker_id: 1})
        await watch.refresh()
        assert not scheduler.worker_ids
        worker.change({b"abcdefgh"})
        puppet.beat()
        scheduler.caches.clear()
        await watch.refresh()
        await wait_until_async(partial(knows, scheduler, [worker]), LIVENESS_SECONDS)


async def test_a_worker_that_writes_nonsense_is_told_of_once_and_holds_up_nobody(
    client: redis.asyncio.Redis, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    confused, lively = PuppetWorker(redis_client), PuppetWorker(redis_client)
    scheduler = CacheRecorder()
    async with watching(client, scheduler):
        for _ in range(20):
            redis_client.xadd(KEYS.status(confused.worker_id), {"s": b"\xff", "k": b"\xff"})
        confused.report(generated_tokens=7)
        lively.report(generated_tokens=8)
        await wait_until_async(
            lambda: (
                [scheduler.statuses[w.worker_id][-1:] for w in (confused, lively)]
                and all(len(scheduler.statuses[w.worker_id]) == 2 for w in (confused, lively))
            ),
            LIVENESS_SECONDS,
        )

    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if "status of worker" in text]) == 1
    assert len([text for text in told if "cannot be followed" in text]) == 1
