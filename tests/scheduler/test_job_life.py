"""Jobs that must wait, and jobs whose time is over."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.scheduler_process import (
    LIVENESS_SECONDS,
    SchedulerProcess,
    StartScheduler,
    wait_for_leader,
)
from support.shard import KEYS, cancel, dispatch, lead, read_log, submit
from support.wait import wait_until
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import JobEnd, JobTerms
from tidemill.service.redis import connect_async
from tidemill.service.runtime import CRASH_STATUS
from tidemill_scheduler.fleet.grace import Grace, Moment
from tidemill_scheduler.upkeep.job_life import JobLife

#: Long enough that a test is never a long gap by itself.
LEASE_SECONDS = 600.0


def state_of(client: redis.Redis, job_id: str) -> str:
    return (client.hget(KEYS.job(job_id), "st") or b"").decode()


def reason_of(client: redis.Redis, job_id: str) -> str:
    _, fields = client.xrevrange(KEYS.token_log(job_id), count=1)[0]
    return decode(fields[b"e"], JobEnd).finish_reason or ""


def server_ms(client: redis.Redis) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def moment(client: redis.Redis, ago: float) -> Moment:
    """The moment so many seconds ago, or to come if they are negative."""
    return Moment(time.monotonic() - ago, server_ms(client) / 1000 - ago)


def see_again(grace: Grace, client: redis.Redis, until: float = 0.0) -> None:
    """Let the grace see the server "r1" for the lease that ended so many seconds ago."""
    grace.resume("r1", moment(client, ago=until + 2 * LEASE_SECONDS))
    for tenths in range(20, -1, -1):
        grace.lacks(moment(client, ago=until + LEASE_SECONDS * tenths / 10))


class Ledger:
    """What a ``JobLife`` was told to forget."""

    def __init__(self) -> None:
        self.job_ids: list[str] = []

    def forget(self, job_id: str) -> None:
        self.job_ids.append(job_id)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def grace(redis_client: redis.Redis) -> Grace:
    """One that is over."""
    grace = Grace(LEASE_SECONDS)
    see_again(grace, redis_client)
    return grace


@pytest.fixture
async def life(
    redis_url: str, redis_client: redis.Redis, grace: Grace, ledger: Ledger
) -> AsyncIterator[JobLife]:
    async with connect_async(redis_url, retries=0) as client:
        yield JobLife(client, KEYS, grace, ledger.forget)


async def test_only_delayed_jobs_whose_time_has_come_are_queued(
    life: JobLife, redis_client: redis.Redis
) -> None:
    now_ms = server_ms(redis_client)
    late = submit(redis_client, terms=JobTerms(delay_ms=3_600_000))
    due = [submit(redis_client, terms=JobTerms(not_before_ms=now_ms + 60_000)) for _ in range(300)]
    for job_id in due:
        redis_client.zadd(KEYS.delayed, {job_id: 1}, xx=True)

    assert await life.promote() == 300

    assert {state_of(redis_client, job_id) for job_id in due} == {"queued"}
    assert state_of(redis_client, late) == "delayed"
    for job_id in (late, *due):
        cancel(redis_client, job_id)


async def test_an_expired_job_is_forgotten_and_leaves_no_pointer(
    life: JobLife, ledger: Ledger, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client, terms=JobTerms(deadline_ms=1))
    await asyncio.to_thread(wait_until, lambda: server_ms(redis_client) > _due_ms(redis_client))

    assert await life.expire() == 1

    assert (state_of(redis_client, job_id), reason_of(redis_client, job_id)) == (
        "expired",
        "deadline",
    )
    assert ledger.job_ids == [job_id]
    assert not redis_client.xlen(KEYS.ingress("p1:default"))


def _due_ms(client: redis.Redis) -> float:
    return float(client.zrange(KEYS.due, 0, 0, withscores=True)[0][1])


async def test_a_running_job_expires_wherever_it_runs(
    life: JobLife, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client, terms=JobTerms(deadline_ms=60_000))
    dispatch(redis_client, job_id, lead(redis_client), "wkr_elsewhere")
    redis_client.hset(KEYS.job(job_id), "dl", 1)
    redis_client.zadd(KEYS.due, {job_id: 1})

    assert await life.expire() == 1

    assert state_of(redis_client, job_id) == "expired"
    kinds = [fields[b"k"] for _, fields in redis_client.xrange(KEYS.commands("wkr_elsewhere"))]
    assert kinds == [b"run", b"cancel"]


async def test_a_job_looked_at_before_its_limit_is_looked_at_again(
    life: JobLife, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client, terms=JobTerms(deadline_ms=3_600_000))
    redis_client.zadd(KEYS.due, {job_id: 1})

    assert await life.expire() == 0

    assert state_of(redis_client, job_id) == "queued"
    assert _due_ms(redis_client) > server_ms(redis_client)
    cancel(redis_client, job_id)


async def test_no_job_is_stalled_before_its_worker_could_write_again(
    life: JobLife, grace: Grace, redis_client: redis.Redis
) -> None:
    terms = JobTerms(stall_ms=60_000, deadline_ms=3_600_000)
    stalled, late = (submit(redis_client, terms=terms) for _ in range(2))
    epoch = lead(redis_client)
    for job_id in (stalled, late):
        dispatch(redis_client, job_id, epoch)
        redis_client.hset(KEYS.job(job_id), "td", 1)
        redis_client.zadd(KEYS.due, {job_id: 1})
    redis_client.hset(KEYS.job(late), "dl", 1)

    # Another server has answered a moment ago.
    grace.resume("r2", moment(redis_client, ago=0))
    assert await life.expire() == 1
    assert (state_of(redis_client, late), reason_of(redis_client, late)) == ("expired", "deadline")
    assert state_of(redis_client, stalled) == "run"
    see_again(grace, redis_client)
    assert await life.expire() == 1

    assert reason_of(redis_client, stalled) == "stalled"


async def test_no_job_is_stalled_by_a_pause_that_nobody_has_noted_yet(
    life: JobLife, grace: Grace, redis_client: redis.Redis
) -> None:
    stalled = submit(redis_client, terms=JobTerms(stall_ms=60_000))
    dispatch(redis_client, stalled, lead(redis_client))
    redis_client.hset(KEYS.job(stalled), "td", 1)
    redis_client.zadd(KEYS.due, {stalled: 1})
    # The last contact was before the pause.
    see_again(grace, redis_client, until=LEASE_SECONDS / 3)

    assert await life.expire() == 0

    see_again(grace, redis_client)
    assert await life.expire() == 1
    assert reason_of(redis_client, stalled) == "stalled"


def test_a_delayed_job_runs_when_its_time_has_come(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = PuppetWorker(redis_client)
    job_id = submit(redis_client, terms=JobTerms(delay_ms=300))
    ready_ms = redis_client.zscore(KEYS.delayed, job_id)

    [claim] = wait_until(worker.read, LIVENESS_SECONDS)

    assert claim.job_id == job_id
    dispatched_ms = int(redis_client.hget(KEYS.job(job_id), "td") or 0)
    assert ready_ms is not None
    print(f"dispatched {dispatched_ms - ready_ms:.0f} ms after its time")
    assert dispatched_ms >= ready_ms
    assert worker.finish(claim).accepted


@pytest.mark.leaks_keys
def test_a_damaged_job_holds_up_no_other(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    damaged, healthy = (submit(redis_client, terms=JobTerms(delay_ms=600_000)) for _ in range(2))
    redis_client.hset(KEYS.job(damaged), "dl", "abc")
    redis_client.zadd(KEYS.delayed, {damaged: 1, healthy: 2})

    wait_until(lambda: state_of(redis_client, healthy) == "queued", LIVENESS_SECONDS)
    assert int(redis_client.get(KEYS.epoch) or 0) == 1


def test_each_time_limit_ends_a_job_with_its_own_reason(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    impatient = submit(redis_client, terms=JobTerms(max_queue_ms=300))
    limited = submit(redis_client, terms=JobTerms(deadline_ms=300))
    ids = [impatient, limited]
    wait_until(lambda: all(state_of(redis_client, j) == "expired" for j in ids), LIVENESS_SECONDS)
    worker = PuppetWorker(redis_client)
    ids.append(submit(redis_client, terms=JobTerms(stall_ms=300)))
    [claim] = wait_until(worker.read, LIVENESS_SECONDS)
    wait_until(lambda: state_of(redis_client, claim.job_id) == "expired", LIVENESS_SECONDS)

    reasons = [reason_of(redis_client, job_id) for job_id in ids]
    assert reasons == ["queue_timeout", "deadline", "stalled"]
    assert not worker.finish(claim).accepted
    wait_until(lambda: not redis_client.exists(KEYS.ingress("p1:default")), LIVENESS_SECONDS)


@pytest.mark.parametrize("point", ["before_promote", "after_promote"])
def test_a_crash_while_promoting_queues_each_job_once(
    redis_client: redis.Redis, start_scheduler: StartScheduler, point: str
) -> None:
    crashing = start_scheduler(crash_at=f"scheduler.{point}")
    wait_for_leader(redis_client)
    ids = [submit(redis_client, terms=JobTerms(delay_ms=200)) for _ in range(5)]
    assert crashing.process.wait(LIVENESS_SECONDS) == CRASH_STATUS

    start_scheduler()
    worker = PuppetWorker(redis_client)

    def enough() -> bool:
        worker.work_off()
        return len(worker.claims) >= 5

    wait_until(enough, LIVENESS_SECONDS)
    assert sorted(worker.job_ids) == sorted(ids)
    assert {claim.fence for claim in worker.claims} == {1}


@pytest.mark.parametrize("point", ["before_expire", "after_expire"])
def test_a_crash_while_expiring_ends_each_job_once(
    redis_client: redis.Redis, start_scheduler: StartScheduler, point: str
) -> None:
    crashing = start_scheduler(crash_at=f"scheduler.{point}")
    wait_for_leader(redis_client)
    ids = [submit(redis_client, terms=JobTerms(deadline_ms=200)) for _ in range(5)]
    assert crashing.process.wait(LIVENESS_SECONDS) == CRASH_STATUS

    start_scheduler()

    wait_until(lambda: all(state_of(redis_client, j) == "expired" for j in ids), LIVENESS_SECONDS)
    assert all(read_log(redis_client, job_id).terminals == ["expired"] for job_id in ids)
    assert set(redis_client.hkeys(KEYS.counters)) == {b"rb"}
