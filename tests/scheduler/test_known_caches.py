"""From a worker's blocks to the scheduler's choice: what caches hold is known to every leader."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis
import redis.asyncio

from support.caching_worker import CachingWorker
from support.known_caches import CacheRecorder, digests_in
from support.puppet_worker import PuppetWorker
from support.scheduler_process import (
    LIVENESS_SECONDS,
    SchedulerProcess,
    StartScheduler,
    wait_for_leader,
)
from support.shard import KEYS, REQUEST, lead
from support.wait import wait_until, wait_until_async
from support.waiting_jobs import key_of
from support.worker_rig import BLOCK_SIZE, Rig, make_request, result_of
from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.prefix import hash_blocks, routing_key
from tidemill.service.prompt import extra_keys
from tidemill.service.redis import connect_async
from tidemill_scheduler.fleet.worker_watch import WorkerWatch

#: The salt that the rig's jobs are submitted under, and the revision of its model.
EXTRA = extra_keys(b"\x07" * 16, "r1", None)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


@pytest.fixture
def rig(redis_client: redis.Redis, redis_url: str) -> Iterator[Rig]:
    """A worker with so few blocks that it soon has to evict."""
    rig = Rig(redis_client, redis_url, lead(redis_client), num_blocks=40)
    rig.runner.run_free()
    rig.start()
    yield rig
    rig.stop()


@pytest.fixture
async def recorder(client: redis.asyncio.Redis, rig: Rig) -> AsyncIterator[CacheRecorder]:
    """What a leader that watches the worker knows of its cache."""
    recorder = CacheRecorder()
    watch = WorkerWatch(client, KEYS, recorder, lambda: None)
    await watch.refresh()
    task = asyncio.create_task(watch.follow_statuses())
    yield recorder
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def generate(rig: Rig, prompt: tuple[int, ...]) -> set[bytes]:
    """Run a job; returns the routing hashes of the tokens whose keys and values it computed."""
    job_id = rig.give(make_request(prompt))
    await asyncio.to_thread(rig.wait_for, job_id, "done")
    # The last token was chosen and not computed any more.
    tokens = (*prompt, *result_of(rig.client, job_id).ids)[:-1]
    return digests_in(routing_key(hash_blocks(tokens, BLOCK_SIZE, EXTRA)))


async def test_what_a_worker_computes_is_known_to_the_leader(
    rig: Rig, recorder: CacheRecorder
) -> None:
    expected = await generate(rig, tuple(range(1, 41)))
    expected |= await generate(rig, (*range(1, 21), *range(50, 75)))

    assert len(expected) == 4, "the first hash is of what both share"
    await wait_until_async(lambda: recorder.caches.get(rig.worker_id) == expected, LIVENESS_SECONDS)


async def test_what_a_worker_evicts_is_known_to_the_leader(
    rig: Rig, recorder: CacheRecorder
) -> None:
    first = await generate(rig, tuple(range(1, 41)))
    for number in range(6):
        newest = await generate(rig, tuple(range(100 * number, 100 * number + 40)))
    await wait_until_async(
        lambda: newest <= recorder.caches.get(rig.worker_id, set()), LIVENESS_SECONDS
    )

    known = recorder.caches[rig.worker_id]
    blocks = rig.engine.step_scheduler.block_manager
    assert known == digests_in(blocks.snapshot().digests)
    assert not first & known, "40 blocks have no room for all of it"


def test_a_new_leader_sends_jobs_where_their_prefix_is(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    paths = [(number, 1, 2, 3) for number in range(6)]
    workers = [PuppetWorker(redis_client) for _ in range(3)]
    for worker, owned in zip(workers, (paths[:2], paths[2:4], paths[4:]), strict=True):
        cache = CachingWorker(redis_client, worker.worker_id)
        for path in owned:
            cache.change(digests_in(key_of(path)))

    for epoch in range(2):
        # With a short lease, who was not heard of for seconds gets only what others leave.
        leader = start_scheduler(lease_seconds=300)
        wait_for_leader(redis_client, above_epoch=epoch)
        assert homes_of(redis_client, leader, workers, paths) == [0, 0, 1, 1, 2, 2]
        leader.kill()


def homes_of(
    client: redis.Redis,
    leader: SchedulerProcess,
    workers: list[PuppetWorker],
    paths: Sequence[Sequence[int]],
) -> list[int]:
    """Submit a job of each path, one at a time; returns the numbers of the workers they go to."""
    run(client, calls.salt(KEYS, tenant=REQUEST.tenant, random=b"\x07" * 16))
    homes = []
    for path in paths:
        job = calls.NewJob(new_job_id(), REQUEST, routing_key=key_of((*path, 9)), cost=330)
        run(client, calls.submit(KEYS, job))
        homes.append(wait_until(lambda: taker_of(workers), LIVENESS_SECONDS, leader.log) - 1)
    return homes


def taker_of(workers: list[PuppetWorker]) -> int:
    """Finish the jobs that are there; returns the number of a worker that had one, from 1."""
    busy = [number for number, worker in enumerate(workers, 1) if worker.work_off()]
    return busy[0] if busy else 0
