"""When a job may and must run, as callers say it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.twins import Twin
from tidemill import IdempotencyConflict, InvalidRequest, JobFailed, JobSpec, RateLimited
from tidemill.protocol import calls
from tidemill.protocol.calls import RetryPause
from tidemill.protocol.functions import run
from tidemill.protocol.messages import ChatMessage, GenerateRequest, ModelCard
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.prompt import most_tokens

CARD = ModelCard(name="m", revision="r", tokenizer_digest="d", max_model_len=100, vocab_size=50_000)


def expire(client: redis.Redis, job_id: str, worker_id: str = "") -> str:
    """Let the job's time be over, and the scheduler see it."""
    client.zadd(KEYS.due, {job_id: 1}, xx=True)
    return run(client, calls.expire(KEYS, ref(client, job_id), worker_id=worker_id))


def ref(client: redis.Redis, job_id: str) -> calls.JobRef:
    return calls.JobRef.read(job_id, client.hmget(KEYS.job(job_id), *calls.REF_FIELDS))


def server_ms(client: redis.Redis) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def test_terms_reach_the_job(producer: Twin, mill: FakeMill, redis_client: redis.Redis) -> None:
    job = producer.submit(
        [1], deadline=60.0004, max_queue=7, stall_timeout=0.25, max_retries=0, batch="night.1"
    )
    fields = redis_client.hgetall(KEYS.job(job.id))
    submitted = int(fields[b"ts"])
    assert int(fields[b"dl"]) == submitted + 60_001
    assert int(fields[b"qdl"]) == submitted + 7_000
    assert (fields[b"sm"], fields[b"mx"], fields[b"bid"]) == (b"250", b"0", b"night.1")
    status = producer.job_status(job.id)
    assert (status.deadline_ms, status.batch) == (submitted + 60_001, "night.1")
    assert (status.num_retries, status.max_retries, status.ready_ms) == (0, 0, None)
    assert (status.error, status.finish_reason, status.parent) == (None, None, None)


def test_a_callback_url_reaches_the_job_and_tells_of_its_end(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job = producer.submit([1], callback_url="https://example.com/done?a=1")
    assert redis_client.hget(KEYS.job(job.id), "wh") == b"https://example.com/done?a=1"
    producer.cancel(job.id)
    [(_, entry)] = redis_client.xrange(KEYS.outbox)
    assert (entry[b"j"].decode(), entry[b"u"]) == (job.id, b"https://example.com/done?a=1")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (5, "int is not an address"),
        ("example.com/x", "not an http or https address"),
        ("ftp://example.com/", "not an http or https address"),
        ("https://user@example.com/", "a user name or a password"),
        ("https://example.com/ x", "not an http or https address"),
        ("https://example.com/" + "x" * 2048, "the limit is 2048"),
        ("https://:443/", "names no host"),
        ("https://[::1/", "host or port is not valid"),
    ],
)
def test_what_is_no_address_is_no_callback_url(producer: Twin, url: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        producer.submit([1], callback_url=url)
    assert refusal.value.field == "callback_url"


def test_another_callback_url_is_another_body_of_an_idempotency_key(
    producer: Twin, mill: FakeMill
) -> None:
    producer.submit([1], idempotency_key="k", callback_url="https://example.com/a")
    with pytest.raises(IdempotencyConflict):
        producer.submit([1], idempotency_key="k", callback_url="https://example.com/b")


def test_a_bound_on_the_output_reaches_the_scheduler(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    bounded, open_ended = producer.submit([1], max_tokens=5).id, producer.submit([1]).id
    assert redis_client.hget(KEYS.job(bounded), "mt") == b"5"
    assert redis_client.hget(KEYS.job(open_ended), "mt") is None


def test_without_terms_a_job_may_take_its_time_and_three_retries(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    status = producer.job_status(producer.submit([1], deadline=None, batch=None).id)
    assert (status.deadline_ms, status.batch, status.max_retries) == (None, None, 3)


@pytest.mark.parametrize("how", ["delay", "at"])
def test_a_delayed_job_waits_for_its_time(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, how: str
) -> None:
    before = server_ms(redis_client)
    option = {"delay": 3600} if how == "delay" else {"at": datetime.now(UTC) + timedelta(hours=1)}
    job_id = producer.submit([1], **option).id
    status = producer.job_status(job_id)
    assert status.state == "delayed"
    assert status.ready_ms is not None
    assert before + 3_590_000 < status.ready_ms < before + 3_610_000
    redis_client.zadd(KEYS.delayed, {job_id: 1})
    assert run(redis_client, calls.promote(KEYS, job_id=job_id, queue="p1:default"))
    assert mill.claim().job_id == job_id
    assert producer.job_status(job_id).ready_ms is None


def test_a_time_in_the_past_means_now(producer: Twin, mill: FakeMill) -> None:
    job_id = producer.submit([1], at=datetime(2020, 1, 1, tzinfo=UTC)).id
    assert mill.claim().job_id == job_id


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"delay": -1}, "delay", "-1 s is not between 0 and 2592000 s"),
        ({"delay": 2_592_001}, "delay", "between 0 and 2592000"),
        ({"delay": float("nan")}, "delay", "nan s is not between"),
        ({"delay": "1"}, "delay", "str is not a number of seconds"),
        ({"delay": True}, "delay", "bool is not a number"),
        ({"deadline": 0}, "deadline", "0 s is not between 0.001"),
        ({"deadline": float("inf")}, "deadline", "inf s is not between"),
        ({"delay": 5, "deadline": 5}, "deadline", "5000 ms is not after the delay of 5000 ms"),
        *[
            ({name: sign * 10**digits}, name, "s is not between .* and 2592000 s")
            for name in ("delay", "deadline", "max_queue", "stall_timeout")
            for sign, digits in ((1, 400), (1, 5000), (-1, 400))
        ],
        ({"max_queue": -0.1}, "max_queue", "2592000"),
        ({"stall_timeout": 1e9}, "stall_timeout", "2592000"),
        ({"at": datetime(2030, 1, 1)}, "at", "without a time zone"),
        (
            {"at": datetime.now(UTC) + timedelta(days=1), "deadline": 60},
            "deadline",
            "60000 ms from now is not after the time it may run at",
        ),
        ({"at": 12}, "at", "int does not say when"),
        ({"at": datetime(2300, 1, 1, tzinfo=UTC)}, "at", "after the year 2255"),
        ({"max_retries": 101}, "max_retries", "between 0 and 100"),
        ({"max_retries": -1}, "max_retries", "between 0 and 100"),
        ({"max_retries": 10**5000}, "max_retries", "between 0 and 100"),
        ({"max_retries": 1.5}, "max_retries", "between 0 and 100"),
        ({"batch": ""}, "batch", "not a name of a batch"),
        ({"batch": "a b"}, "batch", "'a b' is not a name"),
        ({"batch": "x" * 129}, "batch", "not a name"),
        ({"batch": 7}, "batch", "not a name"),
        ({"batch": b"x"}, "batch", "not a name"),
        ({"batch": 10**5000}, "batch", "not a name"),
    ],
)
def test_bad_terms_name_field_and_limit_and_queue_nothing(
    producer: Twin,
    mill: FakeMill,
    redis_client: redis.Redis,
    options: dict[str, Any],
    field: str,
    says: str,
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        producer.submit([1], **options)
    assert refusal.value.field == field
    [error] = producer.submit_many([JobSpec([1], **options)])
    assert isinstance(error, InvalidRequest)
    assert not list(redis_client.scan_iter(match=KEYS.job("*")))


def test_a_key_stands_for_the_terms_too(producer: Twin, mill: FakeMill) -> None:
    first = producer.submit([1], idempotency_key="k", deadline=60)
    assert producer.submit([1], idempotency_key="k", deadline=60).id == first.id
    with pytest.raises(IdempotencyConflict):
        producer.submit([1], idempotency_key="k", deadline=61)
    with pytest.raises(IdempotencyConflict):
        producer.submit([1], idempotency_key="k")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"deadline": 0.001}, "deadline"), ({"max_queue": 0.001}, "queue_timeout")],
)
def test_an_expired_job_tells_which_limit_passed(
    producer: Twin,
    mill: FakeMill,
    redis_client: redis.Redis,
    options: dict[str, Any],
    reason: str,
) -> None:
    job_id = producer.submit([1], **options).id
    while not expire(redis_client, job_id):
        pass
    with pytest.raises(JobFailed, match="expired: the job") as failure:
        producer.result(job_id)
    assert (failure.value.state, failure.value.finish_reason) == ("expired", reason)
    with pytest.raises(JobFailed) as failure:
        list(producer.stream(job_id))
    assert failure.value.finish_reason == reason
    status = producer.job_status(job_id)
    assert (status.state, status.finish_reason) == ("expired", reason)
    assert status.error is not None and status.error.startswith("the job")


def test_a_stalled_job_leaves_its_partial_result(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1], stall_timeout=0.001).id
    attempt = mill.claim()
    attempt.say(2)
    while not expire(redis_client, job_id, mill.worker_id):
        pass
    with pytest.raises(JobFailed) as failure:
        producer.result(job_id)
    assert (failure.value.state, failure.value.finish_reason) == ("expired", "stalled")
    assert failure.value.result is not None and failure.value.result.token_ids == (0, 1)


def test_a_job_that_is_tried_again_tells_its_last_error(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1], max_retries=1).id
    attempt = mill.claim()
    nack = calls.nack(
        KEYS,
        ref(redis_client, job_id),
        fence=attempt.fence,
        worker_id=mill.worker_id,
        error="the disk is slow",
        pause=RetryPause(base_ms=60_000),
    )
    run(redis_client, nack)
    status = producer.job_status(job_id)
    assert (status.state, status.error, status.num_retries) == ("delayed", "the disk is slow", 1)
    assert status.ready_ms is not None


def test_a_job_counts_its_prompt_and_its_longest_output() -> None:
    def most(max_tokens: int | None = None, **prompt: Any) -> int:
        params = SamplingParams(max_tokens=max_tokens)
        return most_tokens(GenerateRequest(model="m", params=params, **prompt), CARD)

    assert most(7, prompt_ids=(1, 2, 3)) == 10
    assert most(None, prompt_ids=(1, 2, 3)) == 100
    assert most(7, prompt="x" * 9) == 3 + 7
    assert most(7, prompt="x" * 4_000) == 100
    turns = (ChatMessage(role="system", content="ab"), ChatMessage(role="user", content="é" * 3))
    assert most(7, messages=turns) == 2 + 7


def test_what_jobs_count_is_held_against_the_tenants_limits(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.settings, mapping={"rpm:*": 100, "tpm:*": 100})
    producer.submit([1, 2, 3], max_tokens=70)
    assert redis_client.hget(KEYS.counters, "qt:default") == b"73"
    with pytest.raises(RateLimited, match="100 tokens per minute") as refusal:
        producer.submit([1, 2, 3], max_tokens=70)
    assert 20 < refusal.value.retry_after_seconds <= 60


def test_a_deadline_after_the_start_is_taken(producer: Twin, mill: FakeMill) -> None:
    job = producer.submit([1], at=datetime.now(UTC) + timedelta(hours=1), deadline=7200)
    assert producer.job_status(job.id).state == "delayed"
