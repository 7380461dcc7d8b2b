"""Reading pointers in the name of an epoch."""

import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

from support.shard import (
    KEYS,
    QUEUE,
    cancel,
    claim,
    dispatch,
    entry_of,
    expire_lease,
    lead,
    read_pointers,
    reap,
    submit,
)
from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.messages import JobTerms
from tidemill.service.redis import connect_async
from tidemill_scheduler.intake.ingress import Ingress


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


@pytest.mark.leaks_keys
async def test_a_leader_reads_what_the_one_before_left_pending_then_what_is_new(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    old = [submit(redis_client) for _ in range(3)]
    assert len(read_pointers(redis_client)) == 3
    new = submit(redis_client)
    ingress = Ingress(client, KEYS, lead(redis_client))

    jobs = [job for _ in range(2) for job in await ingress.read([QUEUE])]

    assert [job.job_id for job in jobs] == [*old, new]
    assert await ingress.read([QUEUE]) == []


async def test_a_requeued_pointer_tells_who_had_the_job_and_how_often_it_crashed(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    epoch = lead(redis_client)
    job_id = submit(redis_client)
    for worker in ("wkr_a", "wkr_b"):
        fence = dispatch(redis_client, job_id, epoch, worker).fence
        claim(redis_client, job_id, fence, worker)
        expire_lease(redis_client, job_id)
        reap(redis_client, job_id)

    [job] = await Ingress(client, KEYS, epoch).read([QUEUE])

    assert (job.attempts, job.crashes, job.last_worker) == (2, 2, "wkr_b")
    cancel(redis_client, job_id)


async def test_a_deadline_is_told_by_the_clock_of_this_process(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client, terms=JobTerms(deadline_ms=60_000), max_output=9)
    before = time.monotonic()

    [job] = await Ingress(client, KEYS, lead(redis_client)).read([QUEUE])

    # The deadline counts from the submission, which lies before; the server's clock has whole ms.
    assert job.deadline - 60 <= time.monotonic()
    assert job.deadline - 60 == pytest.approx(job.since, abs=0.01)
    assert job.since <= before + 0.01
    assert job.max_tokens == 9
    cancel(redis_client, job_id)


@pytest.mark.leaks_keys
async def test_a_leader_of_an_earlier_epoch_reads_nothing(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    epoch = lead(redis_client)
    job_id = submit(redis_client)

    with pytest.raises(StaleEpoch):
        await Ingress(client, KEYS, epoch - 1).read([QUEUE])

    assert [pointer[0] for pointer in read_pointers(redis_client)] == [job_id]


async def test_the_pointer_of_a_job_cancelled_after_it_was_read_is_dropped(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)
    read_pointers(redis_client)
    # As if the server had deleted the entry without its acknowledgement.
    redis_client.xdel(KEYS.ingress(QUEUE), entry_of(redis_client, job_id))
    ingress = Ingress(client, KEYS, lead(redis_client))

    assert await ingress.read([QUEUE]) == []

    assert redis_client.xpending(KEYS.ingress(QUEUE), "sched")["pending"] == 0
    assert cancel(redis_client, job_id) == (1, "cancelled")


async def test_only_empty_queues_are_retired(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)
    redis_client.zadd(KEYS.active_queues, {"p2:empty": 1, "not a queue": 1})
    ingress = Ingress(client, KEYS, lead(redis_client))
    queues = await ingress.active_queues()
    assert sorted(queues) == [QUEUE, "p2:empty"]

    await ingress.retire(queues)

    assert await ingress.active_queues() == [QUEUE]
    assert [job.job_id for job in await ingress.read([QUEUE])] == [job_id]
    cancel(redis_client, job_id)


async def test_many_queues_are_read_to_their_end(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    queues = [f"p1:tenant{number}" for number in range(150)]
    pointer = {"h": "", "c": 1, "m": "m", "a": 0, "p": 0}
    for number, queue in enumerate(queues):
        stream = KEYS.ingress(queue)
        redis_client.xgroup_create(stream, "sched", "0", mkstream=True)
        redis_client.xadd(stream, {"j": f"job_00{number:026d}", **pointer})
    ingress = Ingress(client, KEYS, lead(redis_client))

    jobs = await ingress.read(queues)

    assert [job.queue for job in jobs] == queues


@pytest.fixture
def full_memory(redis_client: redis.Redis) -> Iterator[None]:
    """While it lasts the server refuses whatever needs more memory, once it is asked to."""
    yield
    redis_client.config_set("maxmemory", 0)


async def test_a_malformed_pointer_is_buried_although_memory_is_full(
    client: redis.asyncio.Redis, redis_client: redis.Redis, full_memory: None
) -> None:
    stream = KEYS.ingress(QUEUE)
    redis_client.xgroup_create(stream, "sched", "0", mkstream=True)
    entry_id = redis_client.xadd(stream, {"j": "job_nonsense"})
    ingress = Ingress(client, KEYS, lead(redis_client))
    redis_client.config_set("maxmemory", 1)

    assert await ingress.read([QUEUE]) == []

    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert (letter[b"j"], letter[b"e"]) == (b"job_nonsense", entry_id)
    assert not redis_client.xlen(stream)
