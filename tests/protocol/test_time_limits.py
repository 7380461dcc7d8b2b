"""Jobs whose time comes, and jobs whose time is over."""

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from support.wait import wait_until
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import JobTerms

pytestmark = pytest.mark.leaks_keys

HOUR = 3_600_000


def state(client: redis.Redis, job_id: str) -> str:
    return (client.hget(KEYS.job(job_id), "st") or b"gone").decode()


def pass_by(client: redis.Redis, job_id: str, *limits: str) -> None:
    """Make limits of a job look passed, and the job due."""
    if limits:
        client.hset(KEYS.job(job_id), mapping=dict.fromkeys(limits, 1))
    client.zadd(KEYS.due, {job_id: 1})


def stall(client: redis.Redis, job_id: str) -> None:
    """Make a job's last sign of life look old."""
    client.hset(KEYS.job(job_id), "td", 1)
    if client.hexists(KEYS.job(job_id), "tp"):
        client.hset(KEYS.job(job_id), "tp", 1)
    client.zadd(KEYS.due, {job_id: 1})


def nothing_is_left(client: redis.Redis) -> bool:
    left = client.hgetall(KEYS.counters)
    kept = sum(int(member.split()[0]) for member in client.zrange(KEYS.ended, 0, -1))
    indexes = sum(client.zcard(name) for name in (KEYS.running, KEYS.delayed, KEYS.due))
    return left == {b"rb": b"%d" % kept} and not indexes and not client.xlen(KEYS.ingress(QUEUE))


def test_a_delayed_job_runs_when_its_time_has_come_and_not_before(
    redis_client: redis.Redis,
) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(delay_ms=60))
    ready = redis_client.zscore(KEYS.delayed, job_id) or 0
    wait_until(lambda: shard.promote(redis_client, job_id), what="the job may run")
    assert shard.server_ms(redis_client) >= ready
    assert state(redis_client, job_id) == "queued"
    assert [pointed for pointed, _ in shard.read_pointers(redis_client)] == [job_id]
    assert redis_client.zcard(KEYS.delayed) == 0
    assert redis_client.hget(KEYS.counters, "q:default") == b"1"


def test_promoting_twice_makes_one_pointer(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(delay_ms=HOUR))
    assert not shard.promote(redis_client, job_id)
    redis_client.zadd(KEYS.delayed, {job_id: 1})
    assert [shard.promote(redis_client, job_id) for _ in range(2)] == [True, False]
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1


@pytest.mark.parametrize("what", ["cancelled", "queued", "gone"])
def test_a_time_to_run_that_does_not_hold_any_more_is_forgotten(
    redis_client: redis.Redis, what: str
) -> None:
    job_id = new_job_id() if what == "gone" else shard.submit(redis_client)
    if what == "cancelled":
        shard.cancel(redis_client, job_id)
    pointers = redis_client.xlen(KEYS.ingress(QUEUE))
    redis_client.zadd(KEYS.delayed, {job_id: 1})
    assert not shard.promote(redis_client, job_id)
    assert redis_client.zcard(KEYS.delayed) == 0
    assert state(redis_client, job_id) == what
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == pointers


@pytest.mark.parametrize(
    ("limit", "terms", "reason"),
    [
        ("dl", JobTerms(deadline_ms=HOUR), "deadline"),
        ("qdl", JobTerms(max_queue_ms=HOUR), "queue_timeout"),
    ],
)
@pytest.mark.parametrize("delayed", [False, True])
def test_a_waiting_job_expires_once_for_the_limit_that_passed(
    redis_client: redis.Redis, limit: str, terms: JobTerms, reason: str, delayed: bool
) -> None:
    terms = terms.model_copy(update={"delay_ms": HOUR // 2 if delayed else 0})
    job_id = shard.submit(redis_client, terms=terms, num_tokens=9)
    assert shard.expire(redis_client, job_id) == ""
    pass_by(redis_client, job_id, limit)
    assert [shard.expire(redis_client, job_id) for _ in range(2)] == [reason, ""]
    assert state(redis_client, job_id) == "expired"
    assert shard.read_log(redis_client, job_id).terminals == ["expired"]
    assert nothing_is_left(redis_client)


@pytest.mark.parametrize("reason", ["deadline", "stalled"])
def test_a_running_job_expires_and_its_worker_is_told(
    redis_client: redis.Redis, reason: str
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=HOUR, stall_ms=HOUR // 4))
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    shard.append(redis_client, job_id, fence, 0, 2)
    if reason == "deadline":
        pass_by(redis_client, job_id, "dl")
    else:
        stall(redis_client, job_id)
    assert shard.expire(redis_client, job_id, "wkr_b") == "moved"
    assert state(redis_client, job_id) == "run"
    assert [shard.expire(redis_client, job_id, "wkr_a") for _ in range(2)] == [reason, ""]
    kinds = [fields[b"k"] for _, fields in redis_client.xrange(KEYS.commands("wkr_a"))]
    assert kinds == [b"run", b"cancel"]
    assert not shard.append(redis_client, job_id, fence, 2, 1).owned
    assert shard.read_log(redis_client, job_id).ids == [0, 1]
    assert nothing_is_left(redis_client)


def test_waiting_for_the_first_worker_is_over_once_there_was_one(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, terms=JobTerms(max_queue_ms=HOUR))
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    pass_by(redis_client, job_id, "qdl")
    assert shard.expire(redis_client, job_id, "wkr_a") == ""
    shard.release(redis_client, job_id, fence)
    pass_by(redis_client, job_id, "qdl")
    assert shard.expire(redis_client, job_id) == ""
    assert redis_client.zcard(KEYS.due) == 0
    assert state(redis_client, job_id) == "queued"


def test_a_look_at_a_job_that_lives_notes_when_to_look_again(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=2 * HOUR, stall_ms=HOUR))
    deadline = int(redis_client.hget(KEYS.job(job_id), "dl") or 0)
    assert redis_client.zscore(KEYS.due, job_id) == deadline
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    dispatched = int(redis_client.hget(KEYS.job(job_id), "td") or 0)
    assert redis_client.zscore(KEYS.due, job_id) == dispatched + HOUR
    shard.append(redis_client, job_id, fence, 0, 1)
    last_token = int(redis_client.hget(KEYS.job(job_id), "tp") or 0)
    pass_by(redis_client, job_id)
    assert shard.expire(redis_client, job_id, "wkr_a") == ""
    assert redis_client.zscore(KEYS.due, job_id) == last_token + HOUR
    shard.release(redis_client, job_id, fence)
    pass_by(redis_client, job_id)
    assert shard.expire(redis_client, job_id) == ""
    assert redis_client.zscore(KEYS.due, job_id) == deadline


def test_a_stall_counts_from_the_dispatch_of_this_attempt(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, terms=JobTerms(stall_ms=HOUR))
    first = shard.dispatch(redis_client, job_id, epoch).fence
    shard.append(redis_client, job_id, first, 0, 1)
    redis_client.hset(KEYS.job(job_id), "tp", 1)
    shard.release(redis_client, job_id, first)
    shard.dispatch(redis_client, job_id, epoch)
    pass_by(redis_client, job_id)
    assert shard.expire(redis_client, job_id, "wkr_a") == ""
    stall(redis_client, job_id)
    assert shard.expire(redis_client, job_id, "wkr_a") == "stalled"


@pytest.mark.parametrize("ended", [True, False])
def test_a_limit_of_a_job_that_ended_or_is_gone_is_forgotten(
    redis_client: redis.Redis, ended: bool
) -> None:
    job_id = shard.submit(redis_client) if ended else new_job_id()
    if ended:
        shard.cancel(redis_client, job_id)
    redis_client.zadd(KEYS.due, {job_id: 1})
    assert shard.expire(redis_client, job_id) == ""
    assert redis_client.zcard(KEYS.due) == 0
    assert state(redis_client, job_id) == ("cancelled" if ended else "gone")


def test_a_job_whose_limit_passed_is_not_dispatched_and_keeps_its_pointer_for_expire(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=HOUR))
    pass_by(redis_client, job_id, "dl")
    late = shard.dispatch(redis_client, job_id, epoch)
    assert (late.fence, late.state) == (0, "expired")
    assert not redis_client.exists(KEYS.commands("wkr_a"), KEYS.token_log(job_id))
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1
    assert shard.expire(redis_client, job_id) == "deadline"
    assert nothing_is_left(redis_client)


def test_a_job_past_its_deadline_that_its_worker_finishes_first_is_done(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=HOUR))
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    pass_by(redis_client, job_id, "dl")
    assert shard.finish(redis_client, job_id, fence, 0, 1).accepted
    assert shard.expire(redis_client, job_id, "wkr_a") == ""
    assert state(redis_client, job_id) == "done"
    assert nothing_is_left(redis_client)


def test_a_job_expires_by_the_servers_clock(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=40))
    wait_until(lambda: shard.expire(redis_client, job_id) == "deadline", what="the deadline")
    deadline = int(redis_client.hget(KEYS.job(job_id), "dl") or 0)
    assert int(redis_client.hget(KEYS.job(job_id), "te") or 0) >= deadline


@pytest.mark.parametrize("how", ["queued", "delayed", "running"])
def test_a_job_with_limits_is_off_every_index_once_it_is_cancelled(
    redis_client: redis.Redis, how: str
) -> None:
    epoch = shard.lead(redis_client)
    delay = HOUR // 2 if how == "delayed" else 0
    terms = JobTerms(delay_ms=delay, deadline_ms=HOUR, max_queue_ms=HOUR, stall_ms=HOUR)
    job_id = shard.submit(redis_client, terms=terms, num_tokens=5)
    if how == "running":
        shard.dispatch(redis_client, job_id, epoch)
    assert shard.cancel(redis_client, job_id, "wkr_a") == (1, "cancelled")
    assert shard.cancel(redis_client, job_id, "wkr_a") == (0, "cancelled")
    assert nothing_is_left(redis_client)
