"""Jobs that no worker can hold, and a leader that was paused."""

from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.shard import KEYS, QUEUE, REQUEST, cancel, lead
from tidemill.protocol import calls
from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.service.redis import connect_async
from tidemill_scheduler.fleet.attention import Attention
from tidemill_scheduler.fleet.worker_watch import WorkerWatch
from tidemill_scheduler.intake.ingress import Ingress
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.upkeep import hopeless
from tidemill_scheduler.upkeep.hopeless import Judge

PATIENCE = 8.0


class Clock:
    """The monotonic clock of the judge."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hopeless, "time", clock)
    return clock


class Court:
    """A judge of one large job, with a small worker; its time passes by itself alone."""

    def __init__(self, client: redis.asyncio.Redis, clock: Clock, epoch: int) -> None:
        self.clock = clock
        self.epoch = epoch
        self.scheduler = Scheduler(silent_seconds=1e9)
        self.watch = WorkerWatch(client, KEYS, self.scheduler, lambda: None)
        self.judge = Judge(
            client, KEYS, self.scheduler, self.refresh, epoch=epoch, patience_seconds=PATIENCE
        )
        self.ingress = Ingress(client, KEYS, epoch)
        self.pause_seconds = 0.0

    async def refresh(self) -> None:
        """Bring the list of workers up to date, after a pause if there is to be one."""
        self.clock.now += self.pause_seconds
        await self.watch.refresh()

    async def sit(self, seconds: int) -> int:
        """Judge each second; returns how many jobs were refused."""
        num_refused = 0
        for _ in range(seconds):
            num_refused += await self.judge.judge()
            self.clock.now += 1
        return num_refused


@pytest.fixture
async def court(redis_url: str, redis_client: redis.Redis, clock: Clock) -> AsyncIterator[Court]:
    async with connect_async(redis_url, retries=0) as client:
        court = Court(client, clock, lead(redis_client))
        PuppetWorker(redis_client, num_blocks=8)
        await court.watch.refresh()
        yield court


async def add_large_job(court: Court, client: redis.Redis) -> str:
    """Let a job wait that only a worker of more than 8 blocks can hold."""
    run(client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    run(client, calls.submit(KEYS, job := calls.NewJob(new_job_id(), REQUEST, cost=1000)))
    for waiting in await court.ingress.read([QUEUE]):
        court.scheduler.add_job(waiting)
    assert court.scheduler.tick(court.clock.now) == []
    return job.job_id


async def test_a_job_that_no_worker_can_hold_fails_after_the_patience(
    court: Court, redis_client: redis.Redis
) -> None:
    job_id = await add_large_job(court, redis_client)
    assert await court.sit(8) == 0

    assert await court.sit(1) == 1

    assert redis_client.hget(KEYS.job(job_id), "st") == b"failed"
    assert court.scheduler.num_waiting == 0


async def test_a_pause_of_the_leader_is_no_patience(
    court: Court, redis_client: redis.Redis
) -> None:
    job_id = await add_large_job(court, redis_client)
    await court.sit(4)

    court.clock.now += 100

    assert await court.sit(8) == 0
    assert await court.sit(1) == 1
    assert redis_client.hget(KEYS.job(job_id), "st") == b"failed"


async def test_a_worker_that_came_a_moment_ago_is_not_overlooked(
    court: Court, redis_client: redis.Redis
) -> None:
    job_id = await add_large_job(court, redis_client)
    await court.sit(8)

    PuppetWorker(redis_client, num_blocks=70)

    assert await court.sit(2) == 0
    [dispatch] = court.scheduler.tick(court.clock.now)
    assert dispatch.job.job_id == job_id
    cancel(redis_client, job_id)


async def test_a_pause_during_the_judgement_puts_it_off(
    court: Court, redis_client: redis.Redis
) -> None:
    job_id = await add_large_job(court, redis_client)
    await court.sit(8)
    court.pause_seconds = 100

    assert await court.sit(1) == 0

    assert court.scheduler.waiting_ids == [job_id]
    cancel(redis_client, job_id)


async def test_a_judge_whose_epoch_is_over_refuses_nothing(
    court: Court, redis_client: redis.Redis
) -> None:
    job_id = await add_large_job(court, redis_client)
    await court.sit(8)
    redis_client.delete(KEYS.leader)
    assert lead(redis_client, "sch_other") > court.epoch

    with pytest.raises(StaleEpoch):
        await court.sit(1)

    assert redis_client.hget(KEYS.job(job_id), "st") == b"queued"
    cancel(redis_client, job_id)


def test_looks_far_apart_are_no_attention() -> None:
    attention = Attention(max_gap=2.0)

    assert [attention.look(float(now)) for now in (0, 2, 3, 6, 7)] == [0, 2, 3, 0, 1]
