"""What is kept of ended jobs, by time and by bytes."""

import time
from collections.abc import AsyncIterator

import pytest
import redis

from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS, SchedulerProcess
from support.shard import KEYS, dispatch, finish, lead, submit
from support.wait import wait_until
from tidemill.service.redis import connect_async
from tidemill_scheduler.upkeep.retention import MAX_TRIMMED, YOUNG_SECONDS, Retention


@pytest.fixture
async def retention(redis_url: str, redis_client: redis.Redis) -> AsyncIterator[Retention]:
    async with connect_async(redis_url, retries=0) as client:
        yield Retention(client, KEYS)


def age(client: redis.Redis, job_id: str) -> None:
    """Let a job have ended long enough ago to be forgotten."""
    ended_ms = int(client.hget(KEYS.job(job_id), "te") or 0)
    client.hset(KEYS.job(job_id), "te", ended_ms - round(YOUNG_SECONDS * 1000) - 1)


def run_jobs(client: redis.Redis, num: int) -> list[str]:
    """Submit, dispatch and finish jobs; returns their ids, the oldest first."""
    epoch, ids = lead(client), []
    for number in range(num):
        ids.append(submit(client))
        fence = dispatch(client, ids[-1], epoch).fence
        assert finish(client, ids[-1], fence, 0, number % 5).accepted
        # Within one ms they would be of one age.
        age(client, ids[-1])
        client.zincrby(KEYS.ended, number - num, client.zrange(KEYS.ended, -1, -1)[0])
    return ids


def kept_bytes(client: redis.Redis) -> int:
    return int(client.hget(KEYS.counters, "rb") or 0)


def account(client: redis.Redis) -> int:
    return sum(int(member.split(b" ")[0]) for member in client.zrange(KEYS.ended, 0, -1))


async def test_the_oldest_results_go_until_the_others_fit(
    retention: Retention, redis_client: redis.Redis
) -> None:
    ids = run_jobs(redis_client, 300)
    bound = kept_bytes(redis_client) // 10

    await retention.trim_to(bound)

    left = [bool(redis_client.exists(KEYS.job(job_id))) for job_id in ids]
    assert left == sorted(left), "the oldest are gone"
    assert 25 <= sum(left) <= 31
    assert kept_bytes(redis_client) == account(redis_client) <= bound
    assert not redis_client.exists(KEYS.token_log(ids[0]))


async def test_a_job_that_ended_a_moment_ago_stays_for_submissions_that_are_repeated(
    retention: Retention, redis_client: redis.Redis
) -> None:
    lasting = run_jobs(redis_client, 1)[0]
    young = run_jobs(redis_client, 3 * MAX_TRIMMED)
    for job_id in young:
        redis_client.hset(KEYS.job(job_id), "te", round(time.time() * 1000))
    # As a dead job it is kept longer than those that ended after it.
    [member] = [m for m in redis_client.zrange(KEYS.ended, 0, -1) if lasting.encode() in m]
    redis_client.zincrby(KEYS.ended, 3_600_000, member)

    await retention.trim_to(1)

    left = [bool(redis_client.exists(KEYS.job(job_id))) for job_id in [lasting, *young]]
    assert left == [False] + [True] * len(young)
    assert kept_bytes(redis_client) == account(redis_client)


async def test_results_within_the_bound_stay(
    retention: Retention, redis_client: redis.Redis
) -> None:
    run_jobs(redis_client, 3)

    await retention.trim_to(kept_bytes(redis_client))

    assert redis_client.zcard(KEYS.ended) == 3


async def test_jobs_whose_time_is_over_leave_the_account(
    retention: Retention, redis_client: redis.Redis
) -> None:
    ids = run_jobs(redis_client, 200)
    for member in redis_client.zrange(KEYS.ended, 0, 149):
        redis_client.zadd(KEYS.ended, {member: 1})
    # As the server does by itself.
    redis_client.delete(*(KEYS.job(job_id) for job_id in ids[:150]))

    await retention.settle_expired()

    assert redis_client.zcard(KEYS.ended) == 50
    assert kept_bytes(redis_client) == account(redis_client)


def test_the_leader_keeps_what_the_setting_allows(
    redis_client: redis.Redis, leader: SchedulerProcess
) -> None:
    worker = PuppetWorker(redis_client)
    ids = [submit(redis_client) for _ in range(3)]

    def ended() -> bool:
        worker.work_off()
        return redis_client.zcard(KEYS.ended) == len(ids)

    wait_until(ended, LIVENESS_SECONDS)
    for job_id in ids:
        age(redis_client, job_id)
    redis_client.hset(KEYS.settings, "result_bytes", 1)

    wait_until(lambda: not redis_client.zcard(KEYS.ended), LIVENESS_SECONDS)

    assert not redis_client.exists(*(KEYS.job(job_id) for job_id in ids))
    assert not redis_client.exists(KEYS.counters)
