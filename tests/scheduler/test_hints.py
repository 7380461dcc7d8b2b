"""What the leader tells workers of their caches."""

import asyncio
from collections.abc import AsyncIterator

import msgpack
import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS
from support.shard import KEYS, entry_of, lead, submit
from support.wait import wait_until_async
from support.waiting_jobs import make_job
from tidemill.protocol.calls import MAX_HINTS
from tidemill.service.redis import connect_async
from tidemill_scheduler.dispatcher import Dispatcher
from tidemill_scheduler.fleet.worker_watch import WorkerWatch
from tidemill_scheduler.health import Health
from tidemill_scheduler.policy.hints import Hint
from tidemill_scheduler.policy.scheduler import Scheduler

pytestmark = pytest.mark.leaks_keys


class Hinter(Scheduler):
    """Has hints to give."""

    def __init__(self) -> None:
        super().__init__(silent_seconds=60.0)
        self.hints: list[Hint] = []

    def take_hints(self) -> list[Hint]:
        """Give each once."""
        hints, self.hints = self.hints, []
        return hints


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


@pytest.fixture
def scheduler() -> Hinter:
    return Hinter()


@pytest.fixture
async def dispatcher(
    client: redis.asyncio.Redis, redis_client: redis.Redis, scheduler: Hinter
) -> AsyncIterator[Dispatcher]:
    epoch = lead(redis_client)
    dispatcher = Dispatcher(client, KEYS, scheduler, Health(), epoch=epoch, lease_ms=60_000)
    task = asyncio.create_task(dispatcher.run())
    yield dispatcher
    assert not task.done(), "it must go on whatever becomes of a hint"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def commands(client: redis.Redis, worker: PuppetWorker) -> list[tuple[bytes, object]]:
    """Kind of each command, with its job or its hints."""
    return [
        (fields[b"k"], fields.get(b"j") or msgpack.unpackb(fields[b"h"], strict_map_key=False))
        for _, fields in client.xrange(KEYS.commands(worker.worker_id))
    ]


def add_job(client: redis.Redis, scheduler: Scheduler) -> bytes:
    job_id = submit(client)
    job = make_job(job_id=job_id)
    scheduler.add_job(
        type(job)(job_id, "p1:default", entry_of(client, job_id), job.model, cost=job.cost)
    )
    return job_id.encode()


async def test_hints_follow_the_jobs_of_the_same_tick_and_go_alone_as_well(
    client: redis.asyncio.Redis,
    redis_client: redis.Redis,
    scheduler: Hinter,
    dispatcher: Dispatcher,
) -> None:
    worker = PuppetWorker(redis_client)
    await WorkerWatch(client, KEYS, scheduler, dispatcher.wake).refresh()
    job_id = add_job(redis_client, scheduler)
    scheduler.hints = [Hint(worker.worker_id, {b"12345678": 3})]
    dispatcher.wake()
    await wait_until_async(lambda: len(commands(redis_client, worker)) == 2, LIVENESS_SECONDS)
    scheduler.hints = [Hint(worker.worker_id, {b"12345678": 0, b"abcdefgh": 1})]
    dispatcher.wake()
    await wait_until_async(lambda: len(commands(redis_client, worker)) == 3, LIVENESS_SECONDS)

    assert commands(redis_client, worker) == [
        (b"run", job_id),
        (b"hint", {b"12345678": 3}),
        (b"hint", {b"12345678": 0, b"abcdefgh": 1}),
    ]


async def test_a_hint_that_the_server_refuses_delays_nothing(
    client: redis.asyncio.Redis,
    redis_client: redis.Redis,
    scheduler: Hinter,
    dispatcher: Dispatcher,
) -> None:
    redis_client.set(KEYS.commands("wkr_odd"), "no stream")
    worker = PuppetWorker(redis_client)
    await WorkerWatch(client, KEYS, scheduler, dispatcher.wake).refresh()
    job_ids = [add_job(redis_client, scheduler) for _ in range(2)]
    scheduler.hints = [
        Hint("wkr_odd", {b"12345678": 3}),
        Hint("wkr_gone", {b"12345678": 3}),
        Hint(worker.worker_id, {b"12345678": 3}),
    ]
    dispatcher.wake()
    await wait_until_async(lambda: len(commands(redis_client, worker)) == 3, LIVENESS_SECONDS)

    told = commands(redis_client, worker)
    assert sorted(told[:2]) == sorted((b"run", job_id) for job_id in job_ids)
    assert told[2] == (b"hint", {b"12345678": 3})
    assert not redis_client.exists(KEYS.commands("wkr_gone"))


async def test_many_hints_for_one_worker_go_in_pieces_that_it_can_read(
    client: redis.asyncio.Redis,
    redis_client: redis.Redis,
    scheduler: Hinter,
    dispatcher: Dispatcher,
) -> None:
    worker = PuppetWorker(redis_client)
    redis_client.xadd(KEYS.commands(worker.worker_id), {"k": "drain", "j": "none"})
    refs = {number.to_bytes(8): number for number in range(2 * MAX_HINTS + 1)}
    scheduler.hints = [Hint(worker.worker_id, dict(refs))]
    dispatcher.wake()
    await wait_until_async(lambda: len(commands(redis_client, worker)) == 4, LIVENESS_SECONDS)

    pieces = [told for kind, told in commands(redis_client, worker) if kind == b"hint"]
    assert [len(piece) for piece in pieces] == [MAX_HINTS, MAX_HINTS, 1]  # type: ignore[arg-type]
    assert {k: v for piece in pieces for k, v in piece.items()} == refs  # type: ignore[attr-defined]
