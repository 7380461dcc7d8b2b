"""What submit accepts, what it refuses and what it counts."""

import json

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from support.wait import wait_until
from tidemill.protocol import calls
from tidemill.protocol.errors import BatchClosed, QueueFull, RateLimited
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import JobTerms
from tidemill.protocol.sampling import SamplingParams

pytestmark = pytest.mark.leaks_keys

MEASURES = calls.Measures(
    jobs_per_second=2,
    tokens_per_second=10,
    bytes_per_second=100,
    max_bytes=0,
    durability="fsync",
    run_id="r1",
)
#: What the small job of ``shard.submit`` takes, as encoded.
REQUEST_BYTES = 39


def field(client: redis.Redis, job_id: str, name: str) -> int:
    return int(client.hget(KEYS.job(job_id), name) or 0)


def test_a_job_without_terms_waits_on_its_queue_under_no_other_index(
    redis_client: redis.Redis,
) -> None:
    job_id = shard.submit(redis_client, num_tokens=7)
    assert redis_client.zcard(KEYS.delayed) == redis_client.zcard(KEYS.due) == 0
    assert redis_client.hgetall(KEYS.counters) == {
        b"q:default": b"1",
        b"qt:default": b"7",
        b"qb": b"%d" % redis_client.hstrlen(KEYS.job(job_id), "req"),
    }


@pytest.mark.parametrize(
    ("params", "told"), [({}, b"0"), ({"n": 3}, b"3"), ({"n": 2, "best_of": 5}, b"5")]
)
def test_a_pointer_tells_of_how_many_outputs_its_job_is_whenever_it_is_written(
    redis_client: redis.Redis, params: dict[str, int], told: bytes
) -> None:
    sampling = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
    request = shard.REQUEST.model_copy(update={"params": sampling})
    run(redis_client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    for terms in (JobTerms(), JobTerms(delay_ms=1)):
        job = calls.NewJob(new_job_id(), request, terms=terms)
        run(redis_client, calls.submit(KEYS, job))
    wait_until(lambda: shard.promote(redis_client, job.job_id), 5.0, "the delayed job")
    entries = redis_client.xrange(KEYS.ingress(QUEUE))
    assert [fields[b"s"] for _, fields in entries] == [told, told]


def test_a_delayed_job_is_counted_and_has_no_pointer(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(delay_ms=60_000))
    submitted = field(redis_client, job_id, "ts")
    assert redis_client.zscore(KEYS.delayed, job_id) == submitted + 60_000
    assert redis_client.hget(KEYS.job(job_id), "st") == b"delayed"
    assert not redis_client.exists(KEYS.ingress(QUEUE), KEYS.active_queues)
    assert redis_client.hget(KEYS.counters, "q:default") == b"1"


def test_the_later_of_delay_and_start_time_holds(redis_client: redis.Redis) -> None:
    start = shard.server_ms(redis_client) + 50_000
    early = shard.submit(redis_client, terms=JobTerms(delay_ms=10_000, not_before_ms=start))
    late = shard.submit(redis_client, terms=JobTerms(delay_ms=90_000, not_before_ms=start))
    assert redis_client.zscore(KEYS.delayed, early) == start
    assert redis_client.zscore(KEYS.delayed, late) == field(redis_client, late, "ts") + 90_000


def test_a_start_time_in_the_past_is_now(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, terms=JobTerms(not_before_ms=1))
    assert redis_client.hget(KEYS.job(job_id), "st") == b"queued"


def test_time_limits_are_noted_from_when_they_count(redis_client: redis.Redis) -> None:
    terms = JobTerms(delay_ms=5_000, deadline_ms=90_000, max_queue_ms=3_000, stall_ms=700)
    job_id = shard.submit(redis_client, terms=terms)
    submitted = field(redis_client, job_id, "ts")
    assert field(redis_client, job_id, "dl") == submitted + 90_000
    assert field(redis_client, job_id, "qdl") == submitted + 5_000 + 3_000
    assert field(redis_client, job_id, "sm") == 700
    assert redis_client.zscore(KEYS.due, job_id) == submitted + 8_000


def test_a_tenants_own_bound_on_jobs_wins_over_everybodys_and_the_callers(
    redis_client: redis.Redis,
) -> None:
    redis_client.hset(KEYS.settings, mapping={"jobs:*": 1, "jobs:default": 2})
    for _ in range(2):
        shard.submit(redis_client)
    with pytest.raises(QueueFull, match="2 queued jobs"):
        shard.submit(redis_client)
    redis_client.hdel(KEYS.settings, "jobs:default")
    with pytest.raises(QueueFull):
        shard.submit(redis_client)
    redis_client.hset(KEYS.settings, "jobs:*", 3)
    shard.submit(redis_client)


def test_delayed_jobs_fill_the_queue_too(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "jobs:*", 1)
    shard.submit(redis_client, terms=JobTerms(delay_ms=60_000))
    with pytest.raises(QueueFull):
        shard.submit(redis_client)


def test_a_bound_on_waiting_tokens_lets_a_larger_job_in_alone(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "tokens:*", 100)
    shard.submit(redis_client, num_tokens=500)
    with pytest.raises(QueueFull, match="already have 500 tokens"):
        shard.submit(redis_client, num_tokens=1)


def test_waiting_tokens_are_bounded_up_to_the_limit(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "tokens:*", 100)
    shard.submit(redis_client, num_tokens=60)
    shard.submit(redis_client, num_tokens=40)
    with pytest.raises(QueueFull):
        shard.submit(redis_client, num_tokens=1)


@pytest.mark.parametrize("source", ["setting", "measure"])
def test_the_bytes_of_unfinished_requests_are_bounded(
    redis_client: redis.Redis, source: str
) -> None:
    if source == "setting":
        redis_client.hset(KEYS.settings, "bytes", 2 * REQUEST_BYTES)
    else:
        redis_client.hset(KEYS.measures, "mb", 2 * REQUEST_BYTES)
    epoch = shard.lead(redis_client)
    first, _ = (shard.submit(redis_client) for _ in range(2))
    assert redis_client.hget(KEYS.counters, "qb") == b"%d" % (2 * REQUEST_BYTES)
    fence = shard.dispatch(redis_client, first, epoch).fence
    with pytest.raises(QueueFull, match=f"{2 * REQUEST_BYTES} bytes"):
        shard.submit(redis_client)
    shard.finish(redis_client, first, fence, 0, 1)
    shard.submit(redis_client)


def test_one_job_larger_than_the_bound_on_bytes_may_wait_alone(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "bytes", 1)
    shard.submit(redis_client)
    with pytest.raises(QueueFull):
        shard.submit(redis_client)


@pytest.mark.parametrize(
    ("setting", "seconds"),
    # Rates of 2 jobs, 10 tokens and 100 bytes per second; what is over: 1 job, 30 tokens, 39 bytes.
    [("jobs:*", 0.5), ("tokens:*", 3.0), ("bytes", 0.39)],
)
def test_a_full_queue_says_when_there_will_be_room(
    redis_client: redis.Redis, setting: str, seconds: float
) -> None:
    run(redis_client, calls.measure(KEYS, MEASURES))
    limit = {"jobs:*": 1, "tokens:*": 30, "bytes": REQUEST_BYTES}[setting]
    redis_client.hset(KEYS.settings, setting, limit)
    shard.submit(redis_client, num_tokens=30)
    with pytest.raises(QueueFull) as full:
        shard.submit(redis_client, num_tokens=30)
    assert full.value.retry_after_seconds == pytest.approx(seconds, abs=0.002)


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (1e6, 0.1), (1e-3, 60.0)])
def test_the_advised_pause_is_bounded_and_has_a_default(
    redis_client: redis.Redis, rate: float, seconds: float
) -> None:
    redis_client.hset(KEYS.measures, "rj", rate)
    with pytest.raises(QueueFull) as full:
        shard.submit(redis_client, max_queued=0)
    assert full.value.retry_after_seconds == seconds


def test_requests_per_minute_are_limited_and_come_back(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "rpm:*", 3000)
    for _ in range(2):
        shard.submit(redis_client)
    # As if all the others had come within this moment.
    redis_client.hset(KEYS.rate_buckets("default"), "r", 0)
    with pytest.raises(RateLimited, match="3000 requests per minute") as limited:
        shard.submit(redis_client)
    assert 0 < limited.value.retry_after_seconds <= 0.02  # one in 20 ms
    wait_until(lambda: submits(redis_client), what="a request comes back")


def submits(client: redis.Redis) -> bool:
    try:
        shard.submit(client)
    except RateLimited:
        return False
    return True


def test_tokens_per_minute_are_limited_and_a_large_job_makes_a_debt(
    redis_client: redis.Redis,
) -> None:
    redis_client.hset(KEYS.settings, "tpm:*", 600)
    shard.submit(redis_client, num_tokens=2400)  # more than a minute's, against a full bucket
    with pytest.raises(RateLimited, match="600 tokens per minute") as limited:
        shard.submit(redis_client, num_tokens=10)
    # 1800 of debt and 10 at ten a second.
    assert limited.value.retry_after_seconds == pytest.approx(181, abs=1)
    # The debt is kept until it is paid and the bucket full again.
    assert redis_client.pttl(KEYS.rate_buckets("default")) == pytest.approx(240_000, abs=1000)


def test_a_refused_job_takes_nothing_from_the_buckets(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, mapping={"rpm:*": 60, "tpm:*": 100})
    shard.submit(redis_client, num_tokens=90)
    before = redis_client.hgetall(KEYS.rate_buckets("default"))
    with pytest.raises(RateLimited, match="tokens"):
        shard.submit(redis_client, num_tokens=50)
    redis_client.hset(KEYS.settings, "jobs:*", 0)
    with pytest.raises(QueueFull):
        shard.submit(redis_client)
    assert redis_client.hgetall(KEYS.rate_buckets("default")) == before


def test_a_rate_of_nothing_lets_nothing_in(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "rpm:default", 0)
    for _ in range(2):
        with pytest.raises(RateLimited) as limited:
            shard.submit(redis_client)
        assert limited.value.retry_after_seconds == 60


def test_a_repeated_submit_is_answered_even_where_a_new_job_would_be_refused(
    redis_client: redis.Redis,
) -> None:
    job_id = shard.submit(redis_client)
    redis_client.hset(KEYS.settings, mapping={"jobs:*": 0, "rpm:*": 0})
    assert shard.submit(redis_client, job_id) == job_id


def test_a_receipt_tells_what_the_leader_has_measured(redis_client: redis.Redis) -> None:
    job = calls.NewJob(new_job_id(), shard.REQUEST)
    run(redis_client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    assert run(redis_client, calls.submit(KEYS, job)).durability == ""
    run(redis_client, calls.measure(KEYS, MEASURES))
    again = run(redis_client, calls.submit(KEYS, job))
    assert again == calls.Submitted(False, job.job_id, "fsync", "r1")


def test_a_tenant_without_a_salt_is_told_so(redis_client: redis.Redis) -> None:
    job = calls.NewJob(new_job_id(), shard.REQUEST)
    with pytest.raises(redis.ResponseError, match="NOSALT"):
        run(redis_client, calls.submit(KEYS, job))
    assert redis_client.dbsize() == 0


def test_a_batch_counts_its_jobs_and_lives_while_it_has_any(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    batch, members = KEYS.batch("default", "b"), KEYS.batch_members("default", "b")
    first, second = (shard.submit(redis_client, terms=JobTerms(batch="b")) for _ in range(2))
    shard.submit(redis_client, first)  # a retry counts once
    assert redis_client.hgetall(batch) == {b"total": b"2"}
    assert redis_client.smembers(members) == {first.encode(), second.encode()}
    fence = shard.dispatch(redis_client, first, epoch).fence
    shard.finish(redis_client, first, fence, 0, 1)
    assert redis_client.ttl(batch) == -1
    shard.cancel(redis_client, second)
    assert redis_client.hgetall(batch) == {b"total": b"2", b"done": b"1", b"cancelled": b"1"}
    assert not redis_client.exists(members)
    assert redis_client.ttl(batch) > 29 * 86400
    shard.submit(redis_client, terms=JobTerms(batch="b"))
    assert redis_client.ttl(batch) == -1


def test_a_closed_batch_takes_no_more_jobs(redis_client: redis.Redis) -> None:
    inside = shard.submit(redis_client, terms=JobTerms(batch="b"))
    close = calls.close_batch(KEYS, tenant="default", batch="b", state="cancelled")
    assert [run(redis_client, close) for _ in range(2)] == [1, 1]
    with pytest.raises(BatchClosed, match="'b'"):
        shard.submit(redis_client, terms=JobTerms(batch="b"))
    shard.submit(redis_client, terms=JobTerms(batch="c"))
    assert shard.submit(redis_client, inside) == inside
    assert redis_client.ttl(KEYS.batch("default", "b")) == -1


def test_a_batch_closed_before_its_first_job_is_forgotten_in_time(
    redis_client: redis.Redis,
) -> None:
    run(redis_client, calls.close_batch(KEYS, tenant="default", batch="b", state="cancelled"))
    assert redis_client.ttl(KEYS.batch("default", "b")) > 0
    with pytest.raises(BatchClosed):
        shard.submit(redis_client, terms=JobTerms(batch="b"))


def test_all_jobs_of_a_tenant_are_listed_but_for_lines_of_batch_objects(
    redis_client: redis.Redis,
) -> None:
    one = shard.submit(redis_client)
    named = shard.submit(redis_client, terms=JobTerms(batch="b"), idempotency_key="b")
    later = shard.submit(redis_client, terms=JobTerms(delay_ms=1000))
    line = shard.submit(redis_client, terms=JobTerms(batch="b"), idempotency_key="b:1")
    listed = redis_client.zrange(KEYS.jobs("default"), 0, -1)
    # Those of one millisecond come in the order of their random ids.
    assert sorted(job_id.decode() for job_id in listed) == sorted([one, named, later])
    assert redis_client.exists(KEYS.job(line))


def test_metadata_is_kept_and_counts_as_part_of_the_request(redis_client: redis.Redis) -> None:
    note, job_id = {"of": "t\u00e9st"}, new_job_id()
    size = len('{"of":"t\u00e9st"}'.encode())
    shard.submit(redis_client, job_id, terms=JobTerms(metadata=note))
    assert json.loads(redis_client.hget(KEYS.job(job_id), "meta") or b"") == note
    assert redis_client.hget(KEYS.counters, "qb") == b"%d" % (REQUEST_BYTES + size)
    plain = shard.submit(redis_client)
    shard.cancel(redis_client, job_id)
    assert redis_client.hget(KEYS.counters, "qb") == b"%d" % REQUEST_BYTES
    kept = int(redis_client.hget(KEYS.counters, "rb") or 0)
    assert not redis_client.hexists(KEYS.job(plain), "meta")
    shard.cancel(redis_client, plain)
    assert kept - size == int(redis_client.hget(KEYS.counters, "rb") or 0) - kept
    redis_client.hset(KEYS.settings, "bytes", 2 * REQUEST_BYTES + size - 1)
    shard.submit(redis_client)
    with pytest.raises(QueueFull, match="bytes"):
        shard.submit(redis_client, terms=JobTerms(metadata=note))
