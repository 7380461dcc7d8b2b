"""Jobs that are given back, jobs that are given up, and the letters about them."""

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.calls import NackOutcome, RetryPause
from tidemill.protocol.codec import decode
from tidemill.protocol.functions import run
from tidemill.protocol.messages import GenerateRequest, JobEnd, JobTerms, Usage

pytestmark = pytest.mark.leaks_keys

HOUR = 3_600_000


def state(client: redis.Redis, job_id: str) -> str:
    return (client.hget(KEYS.job(job_id), "st") or b"gone").decode()


def start(client: redis.Redis, job_id: str, worker: str = "wkr_a") -> int:
    epoch = shard.lead(client)
    return shard.dispatch(client, job_id, epoch, worker).fence


def ready_in(client: redis.Redis, job_id: str) -> float:
    return (client.zscore(KEYS.delayed, job_id) or 0) - shard.server_ms(client)


def promote_at_once(client: redis.Redis, job_id: str) -> None:
    client.zadd(KEYS.delayed, {job_id: 1}, xx=True)
    assert shard.promote(client, job_id)


def use_up(client: redis.Redis, retries: int = 0) -> str:
    """Submit a job and let it fail until it is dead."""
    job_id = shard.submit(
        client,
        terms=JobTerms(max_retries=retries),
        idempotency_key="k",
        body_digest="b",
        num_tokens=4,
    )
    for attempt in range(retries + 1):
        if attempt:
            promote_at_once(client, job_id)
        outcome = shard.nack(client, job_id, start(client, job_id), error="boom")
    assert outcome is NackOutcome.DEAD
    return job_id


def test_a_job_given_back_waits_and_its_worker_has_lost_it(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, num_tokens=4)
    fence = start(redis_client, job_id)
    shard.append(redis_client, job_id, fence, 0, 2)
    pause = RetryPause(base_ms=HOUR, cap_ms=HOUR)
    outcomes = [shard.nack(redis_client, job_id, fence, pause=pause) for _ in range(2)]
    assert outcomes == [NackOutcome.DELAYED, NackOutcome.NOT_OURS]
    assert state(redis_client, job_id) == "delayed"
    assert redis_client.hmget(KEYS.job(job_id), "err", "rt") == [b"it hiccuped", b"1"]
    assert not shard.append(redis_client, job_id, fence, 2, 1).owned
    assert not shard.finish(redis_client, job_id, fence, 2).owned
    counts = redis_client.hgetall(KEYS.counters)
    assert (counts[b"q:default"], counts[b"qt:default"]) == (b"1", b"4")
    assert b"r:default" not in counts and redis_client.zcard(KEYS.running) == 0


def test_a_job_tried_again_goes_on_where_it_was(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    fence = start(redis_client, job_id)
    shard.append(redis_client, job_id, fence, 0, 2)
    shard.nack(redis_client, job_id, fence)
    promote_at_once(redis_client, job_id)
    again = start(redis_client, job_id, "wkr_b")
    assert again == fence + 1
    assert shard.append(redis_client, job_id, again, 2, 1, "wkr_b").accepted
    assert shard.read_log(redis_client, job_id).writers == [fence, again]


def test_an_earlier_attempt_of_the_same_worker_cannot_give_the_job_back(
    redis_client: redis.Redis,
) -> None:
    job_id = shard.submit(redis_client)
    old = start(redis_client, job_id)
    shard.release(redis_client, job_id, old)
    start(redis_client, job_id)
    assert shard.nack(redis_client, job_id, old) is NackOutcome.NOT_OURS
    assert state(redis_client, job_id) == "run"


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_the_pause_doubles_up_to_its_cap_and_is_spread(
    redis_client: redis.Redis, jitter: float
) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(max_retries=4))
    pause = RetryPause(base_ms=100_000, cap_ms=500_000, jitter=jitter)
    pauses = []
    for _ in range(4):
        shard.nack(redis_client, job_id, start(redis_client, job_id), pause=pause)
        pauses.append(ready_in(redis_client, job_id))
        promote_at_once(redis_client, job_id)
    expected = [jitter * ms for ms in (100_000, 200_000, 400_000, 500_000)]
    assert pauses == pytest.approx(expected, abs=2_000)


def test_after_many_retries_the_pause_is_the_cap(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(max_retries=100))
    fence = start(redis_client, job_id)
    redis_client.hset(KEYS.job(job_id), "rt", 99)
    shard.nack(redis_client, job_id, fence, pause=RetryPause(cap_ms=60_000))
    assert ready_in(redis_client, job_id) == pytest.approx(60_000, abs=2_000)


def test_a_job_without_retries_left_is_dead_and_keeps_its_request(
    redis_client: redis.Redis,
) -> None:
    job_id = use_up(redis_client, retries=2)
    assert state(redis_client, job_id) == "dead"
    stored = redis_client.hget(KEYS.job(job_id), "req") or b""
    assert decode(stored, GenerateRequest) == shard.REQUEST
    assert 13 * 86400 < redis_client.ttl(KEYS.job(job_id)) <= 14 * 86400
    assert redis_client.ttl(KEYS.idempotency("default", "k")) > 13 * 86400
    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert letter == {
        b"j": job_id.encode(),
        b"r": b"boom",
        b"a": b"3",
        b"w": b"wkr_a",
        b"t": b"default",
    }
    [(_, seal)] = redis_client.xrevrange(KEYS.token_log(job_id), count=1)
    used = Usage(prompt_tokens=3)
    end = JobEnd(state="dead", finish_reason="error", error="boom", usage=used)
    assert decode(seal[b"e"], JobEnd) == end


def test_what_a_dead_job_keeps_is_counted(redis_client: redis.Redis) -> None:
    job_id = use_up(redis_client)
    [member] = redis_client.zrange(KEYS.ended, 0, -1)
    kept = int(member.split()[0])
    assert kept == 500 + redis_client.hstrlen(KEYS.job(job_id), "req")
    assert redis_client.hgetall(KEYS.counters) == {b"rb": b"%d" % kept}


def test_a_retry_after_the_deadline_expires_the_job_at_once(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=HOUR))
    fence = start(redis_client, job_id)
    pause = RetryPause(base_ms=2 * HOUR, cap_ms=2 * HOUR)
    assert shard.nack(redis_client, job_id, fence, pause=pause) is NackOutcome.EXPIRED
    assert state(redis_client, job_id) == "expired"
    assert not redis_client.xlen(KEYS.dead_letters)
    assert redis_client.zcard(KEYS.due) == redis_client.zcard(KEYS.delayed) == 0
    [(_, seal)] = redis_client.xrevrange(KEYS.token_log(job_id), count=1)
    assert decode(seal[b"e"], JobEnd).finish_reason == "deadline"


def test_a_retry_before_the_deadline_is_still_bound_by_it(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(deadline_ms=HOUR))
    assert shard.nack(redis_client, job_id, start(redis_client, job_id)) is NackOutcome.DELAYED
    redis_client.hset(KEYS.job(job_id), "dl", 1)
    redis_client.zadd(KEYS.due, {job_id: 1}, xx=True)
    assert shard.expire(redis_client, job_id) == "deadline"
    assert redis_client.zcard(KEYS.delayed) == 0


@pytest.mark.parametrize("call", ["nack", "append", "finish", "release", "beat"])
def test_another_worker_with_the_right_fence_can_do_nothing(
    redis_client: redis.Redis, call: str
) -> None:
    # After a failover that lost a dispatch, the next one gives the same fence to another worker.
    job_id = shard.submit(redis_client)
    fence = start(redis_client, job_id, "wkr_new")
    before = redis_client.hgetall(KEYS.job(job_id))
    if call == "nack":
        assert shard.nack(redis_client, job_id, fence, "wkr_old") is NackOutcome.NOT_OURS
    elif call == "append":
        assert not shard.append(redis_client, job_id, fence, 0, 1, "wkr_old").owned
    elif call == "finish":
        assert not shard.finish(redis_client, job_id, fence, 0, 1, "wkr_old").owned
    elif call == "beat":
        beat = calls.beat(
            KEYS,
            worker_id="wkr_old",
            model="m",
            tokenizer_digest="t",
            lease_ms=HOUR,
            jobs=[(job_id, fence)],
        )
        assert run(redis_client, beat).lost == (job_id,)
    else:
        assert not shard.release(redis_client, job_id, fence, "wkr_old")
    assert redis_client.hgetall(KEYS.job(job_id)) == before
    assert redis_client.xlen(KEYS.token_log(job_id)) == 1
    assert redis_client.zcard(KEYS.running) == 1


def test_a_retry_is_no_crash(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(max_retries=9))
    for _ in range(2):
        fence = start(redis_client, job_id)
        shard.claim(redis_client, job_id, fence)
        shard.expire_lease(redis_client, job_id)
        assert shard.reap(redis_client, job_id) == 1
    shard.nack(redis_client, job_id, start(redis_client, job_id))
    promote_at_once(redis_client, job_id)
    fence = start(redis_client, job_id)
    shard.claim(redis_client, job_id, fence)
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1


def test_a_job_that_crashes_its_workers_leaves_a_letter_and_its_request(
    redis_client: redis.Redis,
) -> None:
    job_id = shard.submit(redis_client)
    for _ in range(calls.MAX_CRASHES):
        shard.claim(redis_client, job_id, start(redis_client, job_id))
        shard.expire_lease(redis_client, job_id)
        shard.reap(redis_client, job_id)
    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert (letter[b"r"], letter[b"t"]) == (b"crashed its workers", b"default")
    assert redis_client.hexists(KEYS.job(job_id), "req")
    assert b"qb" not in redis_client.hgetall(KEYS.counters)


def drop(client: redis.Redis, job_id: str, *, with_job: bool) -> bool:
    [(entry, _)] = client.xrange(KEYS.dead_letters) or [(b"1-1", {})]
    ref = shard.ref_of(client, job_id)
    call = calls.drop_letter(KEYS, ref, entry_id=entry.decode(), with_job=with_job)
    return run(client, call)


def test_a_letter_dropped_with_its_job_leaves_nothing_of_it(redis_client: redis.Redis) -> None:
    job_id = use_up(redis_client)
    assert [drop(redis_client, job_id, with_job=True) for _ in range(2)] == [True, False]
    assert not redis_client.exists(KEYS.job(job_id), KEYS.token_log(job_id))
    assert not redis_client.zcard(KEYS.ended) and not redis_client.hgetall(KEYS.counters)


def test_a_letter_dropped_alone_leaves_its_job(redis_client: redis.Redis) -> None:
    job_id = use_up(redis_client)
    assert drop(redis_client, job_id, with_job=False)
    assert state(redis_client, job_id) == "dead"
    assert redis_client.zcard(KEYS.ended) == 1


def test_a_letter_never_takes_a_job_along_that_is_not_dead(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    redis_client.xadd(KEYS.dead_letters, {"j": job_id})
    assert drop(redis_client, job_id, with_job=True)
    assert state(redis_client, job_id) == "queued"


def trim(client: redis.Redis) -> int:
    members = [member.decode() for member in client.zrange(KEYS.ended, 0, -1)]
    refs = [shard.ref_of(client, calls.job_of(member)) for member in members]
    call = calls.trim(KEYS, list(zip(members, refs, strict=True)))
    first = run(client, call)
    assert run(client, call) == 0
    return first


def test_trimming_forgets_ended_jobs_and_their_bytes(redis_client: redis.Redis) -> None:
    jobs = [shard.submit(redis_client) for _ in range(3)]
    shard.finish(redis_client, jobs[0], start(redis_client, jobs[0]), 0, 5)
    shard.cancel(redis_client, jobs[1])
    assert trim(redis_client) == 2
    assert not redis_client.exists(*map(KEYS.job, jobs[:2]), *map(KEYS.token_log, jobs[:2]))
    assert state(redis_client, jobs[2]) == "queued"
    assert redis_client.zrange(KEYS.jobs("default"), 0, -1) == [jobs[2].encode()]
    assert b"rb" not in redis_client.hgetall(KEYS.counters)


def test_trimming_settles_the_account_of_jobs_that_have_expired(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    shard.cancel(redis_client, job_id)
    redis_client.delete(KEYS.job(job_id), KEYS.token_log(job_id))
    assert trim(redis_client) == 1
    assert not redis_client.hgetall(KEYS.counters)
    assert not redis_client.exists(KEYS.jobs("default"))


def test_trimming_leaves_a_job_that_was_submitted_again(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    shard.cancel(redis_client, job_id)
    redis_client.delete(KEYS.job(job_id), KEYS.token_log(job_id))
    shard.submit(redis_client, job_id)
    assert trim(redis_client) == 1
    assert state(redis_client, job_id) == "queued"
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1
    assert redis_client.zrange(KEYS.jobs("default"), 0, -1) == [job_id.encode()]


def test_a_job_that_ends_a_second_time_is_accounted_once(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    shard.cancel(redis_client, job_id)
    redis_client.delete(KEYS.job(job_id), KEYS.token_log(job_id))
    shard.submit(redis_client, job_id)
    shard.cancel(redis_client, job_id)
    assert trim(redis_client) == 1
    assert not redis_client.hgetall(KEYS.counters)
