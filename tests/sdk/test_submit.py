"""What goes on the queue, and what is refused before it does."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import redis

from support.fake_mill import KEYS, FakeMill, make_tokenizer
from support.twins import MakeTwin, Twin
from tidemill import (
    BrokerError,
    BrokerUnavailable,
    ChatMessage,
    IdempotencyConflict,
    InvalidRequest,
    JobSpec,
    QueueFull,
    SamplingParams,
    TidemillError,
    UnknownModel,
    _submitter,
)
from tidemill import _async_submitter as async_submitter
from tidemill.protocol import functions
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.prefix import hash_blocks, hint_hash, routing_key
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill.service.prompt import extra_keys
from tidemill_gpuworker.shell.claims import seed_of

T = TypeVar("T")

LONG = list(range(1, 200))


def queued(client: redis.Redis) -> int:
    return int(client.hget(KEYS.counters, "q:default") or 0)


def test_a_job_is_queued_with_what_the_caller_said(producer: Twin, mill: FakeMill) -> None:
    job = producer.submit(
        [1, 2, 3], max_tokens=5, temperature=0.5, stop="x", priority=-3, stream=False, seed=7
    )
    assert job.is_new
    request = mill.claim().request
    assert request.model == "m"
    assert request.prompt_ids == (1, 2, 3)
    assert request.priority == -3
    assert not request.stream
    assert request.params == SamplingParams(max_tokens=5, temperature=0.5, stop=("x",), seed=7)


def test_options_go_before_params(producer: Twin, mill: FakeMill) -> None:
    params = SamplingParams(max_tokens=5, top_p=0.5, seed=0)
    producer.submit([1], params=params, max_tokens=6)
    assert mill.claim().request.params == SamplingParams(max_tokens=6, top_p=0.5, seed=0)


def test_what_is_left_out_has_the_default_of_the_served_model(
    producer: Twin, mill: FakeMill
) -> None:
    mill.advertise(sampling_defaults=SamplingDefaults(temperature=0.6, max_tokens=9))
    producer.submit("a b")
    assert mill.claim().request.params == SamplingParams(temperature=0.6, max_tokens=9)
    producer.submit("a b", temperature=1.0, params=SamplingParams(max_tokens=4))
    assert mill.claim().request.params == SamplingParams(max_tokens=4)


def test_the_seed_of_a_job_without_one_is_left_to_its_id(producer: Twin, mill: FakeMill) -> None:
    seeds = set()
    for _ in range(8):
        job = producer.submit([1])
        request = mill.claim().request
        assert request.params.seed is None
        seeds.add(seed_of(job.id, request))
    assert len(seeds) == 8
    assert max(seeds) > 2**53, "63 bits, not a float's"


def test_text_is_tokenised_hashed_and_costed_before_it_is_sent(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    text = "a b c " * 50
    job_id = producer.submit(text, cache_salt="mine").id
    request = mill.claim().request
    ids = (1, 2, 3) * 50
    assert (request.prompt, request.prompt_ids) == (None, ids)
    assert request.tokenizer_digest == mill.card.tokenizer_digest
    salt, key, cost = redis_client.hmget(KEYS.job(job_id), "salt", "h", "cost")
    extra = extra_keys(salt, "r1", "mine")
    assert key == routing_key(hash_blocks(ids, 16, extra))
    assert len(key) == 8 * (len(ids) // 64)
    assert int(cost) == 150


@pytest.mark.parametrize("prompt", ["a b c", [1, 2, 3]])
def test_a_prefix_id_tells_the_scheduler_what_a_short_prompt_begins_with(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, prompt: Any
) -> None:
    jobs = [producer.submit(prompt, prefix_id=name).id for name in ("p", "p", "q")]
    rows = [redis_client.hmget(KEYS.job(job_id), "h", "g", "salt", "cost") for job_id in jobs]
    extra = extra_keys(rows[0][2] or b"", "r1", None)
    assert [row[0] for row in rows] == [hint_hash(name, extra) for name in ("p", "p", "q")]
    assert all((row[1], row[3]) == (b"1", b"3") for row in rows)
    [(_, pointer), *_] = redis_client.xrange(KEYS.ingress("p1:default"))
    assert (pointer[b"h"], pointer[b"g"]) == (rows[0][0], b"1")


def test_a_prefix_id_belongs_to_what_an_idempotency_key_covers(
    producer: Twin, mill: FakeMill
) -> None:
    producer.submit([1], prefix_id="p", idempotency_key="k")
    assert not producer.submit([1], prefix_id="p", idempotency_key="k").is_new
    with pytest.raises(IdempotencyConflict):
        producer.submit([1], prefix_id="q", idempotency_key="k")


def test_messages_are_rendered_by_the_models_template(producer: Twin, mill: FakeMill) -> None:
    for messages in (
        [{"role": "a", "content": "b"}, {"role": "c", "content": "c"}],
        [ChatMessage(role="a", content="b"), ChatMessage(role="c", content="c")],
    ):
        producer.submit(messages)
        request = mill.claim().request
        assert (request.messages, request.prompt_ids) == (None, (1, 2, 3, 3, 0))


def test_without_the_tokenizer_extra_text_is_sent(
    producer: Twin, mill: FakeMill, monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis
) -> None:
    monkeypatch.setattr(_submitter, "HAS_TOKENIZERS", False)
    monkeypatch.setattr(async_submitter, "HAS_TOKENIZERS", False)
    job_id = producer.submit("a b").id
    request = mill.claim().request
    assert (request.prompt, request.prompt_ids, request.tokenizer_digest) == ("a b", None, None)
    assert redis_client.hget(KEYS.job(job_id), "h") == b""
    producer.submit("a b", prefix_id="p")
    assert mill.claim().request.prefix_id == "p", "for whoever tokenises it"
    with pytest.raises(InvalidRequest, match="context length is 512"):
        producer.submit("a b", max_tokens=512)
    producer.submit(LONG)
    assert mill.claim().request.prompt_ids == tuple(LONG)


def test_token_ids_are_hashed_with_the_tenants_salt(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    keys: dict[str, set[bytes]] = {"red": set(), "blue": set()}
    for tenant in ("red", "blue", "red", "blue"):
        job_id = make_twin(redis_url, tenant=tenant).submit(LONG).id
        keys[tenant].add(redis_client.hget(KEYS.job(job_id), "h") or b"")
        assert mill.claim().request.tenant == tenant
    assert len(keys["red"]) == len(keys["blue"]) == 1
    assert keys["red"] != keys["blue"]


@pytest.mark.parametrize(
    ("prompt", "options", "field", "says"),
    [
        ("", {}, "prompt", "empty"),
        ([], {}, "prompt", "empty"),
        (b"abc", {}, "prompt", "bytes is not a prompt"),
        (7, {}, "prompt", "int is not a prompt"),
        ([1, -1], {}, "prompt_ids.1", "greater than or equal to 0"),
        ([1, "x"], {}, "prompt_ids.1", "valid integer"),
        ([50_000], {}, "prompt_ids", "vocabulary of 50000"),
        ([1] * 512, {}, "prompt_ids", "context length is 512 tokens, and 512 leave no room"),
        ("a " * 512, {}, "prompt", "context length is 512"),
        ([1] * 300_000, {}, "prompt", "300000 items, the limit is 262144"),
        ("a" * (1 << 20), {}, "prompt", "bytes, the limit is 1048576"),
        ("\ud800", {}, "prompt", "unicode|surrogate"),
        ([{"role": "user"}], {}, "messages.0.content", "required"),
        ([{"role": "user", "content": "a", "x": 1}], {}, "messages.0.x", "not permitted"),
        ([1], {"max_tokens": -1}, "max_tokens", "greater than or equal to 1, got -1"),
        ([1], {"max_tokens": 0}, "max_tokens", "got 0"),
        ([1], {"max_tokens": 512}, "params.max_tokens", "context length is 512"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "3 exceeds max_tokens 2"),
        ([1], {"temperature": float("nan")}, "temperature", "finite|greater"),
        ([1], {"temperature": 2.5}, "temperature", "less than or equal to 2, got 2.5"),
        ([1], {"top_p": 0}, "top_p", "greater than 0"),
        ([1], {"seed": -1}, "seed", "greater than or equal to 0"),
        ([1], {"stop": ["x"] * 17}, "stop", "limit is 16"),
        ([1], {"stop": ""}, "stop.0", "it is empty"),
        ([1], {"stop_token_ids": [50_000]}, "params.stop_token_ids", "vocabulary"),
        ([1], {"max_new_tokens": 3}, "max_new_tokens", "not permitted"),
        ([1], {"priority": 2**31}, "priority", "less than"),
        ([1], {"cache_salt": ""}, "cache_salt", "it is empty"),
        ([1], {"idempotency_key": ""}, "idempotency_key", "1 to 256"),
        ([1], {"idempotency_key": "k" * 257}, "idempotency_key", "1 to 256"),
        ([1], {"idempotency_key": 5}, "idempotency_key", "1 to 256"),
        ([1], {"idempotency_key": "a\ud800"}, "idempotency_key", "character 1 is half"),
        ([1], {"idempotency_key": "requeue:job"}, "idempotency_key", "requeue: .* is reserved"),
        ([1], {"idempotency_key": "front:1-0"}, "idempotency_key", "front:, which is reserved"),
        ([1], {"priority": "5"}, "priority", "str is not a number"),
        ([1], {"priority": True}, "priority", "bool is not a number"),
        ([1], {"priority": 10**5000}, "priority", "less than"),
        ([1], {"max_tokens": 10**5000}, "max_tokens", "."),
        ([1], {"temperature": True}, "temperature", "bool is not a number"),
        ([1], {"cache_salt": b"x"}, "cache_salt", "bytes is not text"),
        ([1], {"prefix_id": ""}, "prefix_id", "it is empty"),
        ([1], {"prefix_id": "p" * 129}, "prefix_id", "limit is 128"),
        ([1], {"prefix_id": b"x"}, "prefix_id", "bytes is not text"),
        ([1], {"prefix_id": 7}, "prefix_id", "valid string"),
        ([1], {"prefix_id": "\ud800"}, "prefix_id", "surrogate"),
        ([1], {"stream": "yes"}, "stream", "str is not True or False"),
        ([1], {"ignore_eos": 1}, "ignore_eos", "int is not True or False"),
        ([1], {"params": {"max_tokens": 1}}, "params", "dict is not SamplingParams"),
        ([1], {"params": "x"}, "params", "str is not SamplingParams"),
        ([True], {}, "prompt", "not token ids"),
        ([1, False], {}, "prompt", "not token ids"),
        ([10**5000], {}, "prompt_ids.0", "."),
        ([1], {"model": ""}, "model", "it is empty"),
        ([1], {"model": "x" * 300}, "model", "limit is 256"),
    ],
)
def test_a_bad_request_names_field_and_limit_and_queues_nothing(
    producer: Twin,
    mill: FakeMill,
    redis_client: redis.Redis,
    prompt: Any,
    options: dict[str, Any],
    field: str,
    says: str,
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        producer.submit(prompt, **options)
    assert refusal.value.field == field
    assert queued(redis_client) == 0
    assert not list(redis_client.scan_iter(match=KEYS.job("*")))


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "ü", "a:b", "a\n", 5, None, b"x"])
def test_a_bad_tenant_is_refused(make_twin: MakeTwin, redis_url: str, tenant: Any) -> None:
    with pytest.raises(InvalidRequest, match="tenant") as refusal:
        make_twin(redis_url, tenant=tenant)
    assert refusal.value.field == "tenant"


@pytest.mark.parametrize("options", [{"idempotency_key": "\ud800"}, {"delay": 10**400}])
def test_a_bad_option_takes_the_place_of_its_job_alone(
    producer: Twin, mill: FakeMill, options: dict[str, Any]
) -> None:
    first, bad, last = producer.submit_many([[1], JobSpec([2], **options), [3]])
    assert (first.is_new, last.is_new) == (True, True)
    assert isinstance(bad, InvalidRequest)
    assert bad.field == next(iter(options))


JOB_ID = "job_00" + "0" * 26


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda p: p.cancel(5), "job_id"),
        (lambda p: p.job_status(None), "job_id"),
        (lambda p: p.result(b"job"), "job_id"),
        (lambda p: p.stream(5), "job_id"),
        (lambda p: p.result(JOB_ID, timeout="x"), "timeout"),
        (lambda p: p.result(JOB_ID, timeout=True), "timeout"),
        (lambda p: p.result(JOB_ID, timeout=float("nan")), "timeout"),
        (lambda p: p.result(JOB_ID, timeout=10**5000), "timeout"),
        (lambda p: p.stream(JOB_ID, timeout="x"), "timeout"),
        (lambda p: list(p.map([[1]], max_in_flight="x")), "max_in_flight"),
        (lambda p: list(p.map([[1]], max_in_flight=1.5)), "max_in_flight"),
        (lambda p: list(p.map([[1]], max_in_flight=True)), "max_in_flight"),
        (lambda p: list(p.map([[1]], max_in_flight=-(10**5000))), "max_in_flight"),
    ],
)
def test_a_bad_argument_is_named(
    producer: Twin, mill: FakeMill, ask: Callable[[Twin], object], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as refusal:
        ask(producer)
    assert refusal.value.field == field


def test_without_any_model_the_fix_is_named(producer: Twin, redis_client: redis.Redis) -> None:
    for model in (None, "m"):
        with pytest.raises(UnknownModel) as refusal:
            producer.submit([1], model=model)
        assert "tidemill up" in refusal.value.fix


def test_an_unknown_model_is_told_with_those_that_are_served(
    producer: Twin, mill: FakeMill
) -> None:
    with pytest.raises(UnknownModel, match="'n'") as refusal:
        producer.submit([1], model="n")
    assert "m" in refusal.value.fix
    assert refusal.value.field == "model"


def test_of_several_models_one_must_be_named(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    FakeMill(redis_client, model="n")
    with pytest.raises(InvalidRequest, match="several are served: m, n"):
        producer.submit([1])
    producer.submit([1], model="n")
    assert mill.claim().request.model == "n"


def test_the_model_of_live_workers_is_the_default(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    FakeMill(redis_client, model="n")
    redis_client.zadd(KEYS.workers, {mill.worker_id: 1})
    producer.submit([1])
    assert mill.claim().request.model == "n"


def test_while_no_worker_lives_jobs_wait_for_the_last_model(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.zadd(KEYS.workers, {mill.worker_id: 1})
    producer.submit([1])
    assert mill.claim().request.model == "m"


def test_the_same_key_gets_the_same_job(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    first = producer.submit([1, 2], temperature=0.7, idempotency_key="k")
    again = producer.submit([1, 2], temperature=0.7, idempotency_key="k")
    assert (first.is_new, again.is_new) == (True, False)
    assert again.id == first.id
    assert queued(redis_client) == 1


@pytest.mark.parametrize("options", [{"max_tokens": 9}, {"seed": 1}, {"model": "m"}])
def test_the_same_key_with_another_body_is_a_conflict(
    producer: Twin, mill: FakeMill, options: dict[str, Any]
) -> None:
    job = producer.submit([1, 2], idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match=job.id):
        producer.submit([1, 2], idempotency_key="k", **options)


def test_a_key_belongs_to_its_tenant(make_twin: MakeTwin, redis_url: str, mill: FakeMill) -> None:
    jobs = [make_twin(redis_url, tenant=t).submit([1], idempotency_key="k") for t in "ab"]
    assert jobs[0].id != jobs[1].id


def test_a_full_queue_says_when_to_try_again(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.counters, "q:default", 1_000_000)
    with pytest.raises(QueueFull) as refusal:
        producer.submit([1])
    assert refusal.value.retry_after_seconds > 0
    redis_client.hdel(KEYS.counters, "q:default")
    assert producer.submit([1]).is_new


def test_many_jobs_take_one_round_trip_and_each_gets_its_answer(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    producer.submit([9], idempotency_key="k")
    items = [[1], "", JobSpec([2], max_tokens=3), JobSpec([8], idempotency_key="k"), [4]]
    jobs = producer.submit_many(items, max_tokens=5)
    kinds = [type(job) if isinstance(job, TidemillError) else "job" for job in jobs]
    assert kinds == ["job", InvalidRequest, "job", IdempotencyConflict, "job"]
    requests = [mill.claim().request for _ in range(4)]
    assert [r.prompt_ids for r in requests] == [(9,), (1,), (2,), (4,)]
    assert [r.params.max_tokens for r in requests] == [None, 5, 3, 5]


def test_many_long_jobs_are_sent_in_several_pieces_and_each_gets_its_answer(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill._async_submitter._PACKED_TOKENS", 300)
    prompts = [[1] * 200, [2] * 200, [3] * 90, [], [4] * 400, [5] * 10, [6] * 290]
    jobs = make_twin(redis_url).submit_many(prompts)
    assert [isinstance(job, TidemillError) for job in jobs] == [prompt == [] for prompt in prompts]
    accepted = {job.id: prompt for job, prompt in zip(jobs, prompts, strict=True) if prompt}
    claims = [mill.claim() for _ in accepted]
    assert {claim.job_id: list(claim.request.prompt_ids or ()) for claim in claims} == accepted


def test_a_server_that_lost_its_data_gets_a_new_salt(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    producer.submit(LONG)
    mill.end_all()
    redis_client.delete(KEYS.salts)
    job_id = producer.submit(LONG).id
    assert redis_client.hget(KEYS.job(job_id), "salt") == redis_client.hget(KEYS.salts, "default")


def test_a_server_without_the_functions_gets_them(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.function_flush("SYNC")
    assert producer.submit([1]).is_new


def test_a_server_that_refuses_says_why(producer: Twin, redis_client: redis.Redis) -> None:
    redis_client.set(KEYS.models, "not a sorted set", ex=60)
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        producer.submit([1])


def test_an_absent_server_is_told_within_the_timeout(make_twin: MakeTwin) -> None:
    producer = make_twin("redis://127.0.0.1:1/0", timeout=0.2)
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        producer.submit([1])


def test_wrong_credentials_are_not_tried_again(
    make_twin: MakeTwin, redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.config_resetstat()
    producer = make_twin(f"{redis_url}?password=guess", timeout=20.0)
    with pytest.raises(BrokerUnavailable, match="credentials"):
        producer.submit([1])
    assert redis_client.info("commandstats")["cmdstat_auth"]["calls"] <= 2


def test_a_job_whose_receipt_was_lost_is_queued_once(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[bool] = []

    def lose_once(reply: T) -> T:
        if not lost:
            lost.append(True)
            raise redis.ConnectionError("the reply was lost")
        return reply

    def run_many(*args: Any) -> Any:
        return lose_once(functions.run_many(*args))

    async def run_many_async(*args: Any) -> Any:
        return lose_once(await functions.run_many_async(*args))

    monkeypatch.setattr("tidemill._link.run_many", run_many)
    monkeypatch.setattr("tidemill._async_link.run_many_async", run_many_async)
    job_id = producer.submit([1]).id
    assert lost
    assert queued(redis_client) == 1
    assert mill.claim().job_id == job_id


def test_the_embedded_server_is_the_default(make_twin: MakeTwin) -> None:
    with pytest.raises(BrokerUnavailable, match=r"valkey\.sock") as failure:
        make_twin(timeout=0.01).submit([1])
    assert "tidemill up" in failure.value.fix


def test_the_environment_names_the_server(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_url)
    assert make_twin().submit([1]).is_new


def test_another_shard_is_another_world(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill
) -> None:
    with pytest.raises(UnknownModel):
        make_twin(redis_url, shard="01").submit([1])
    assert ShardKeys("01").prefix != KEYS.prefix


def test_a_prompt_too_large_for_one_step_of_the_loop_is_prepared_as_well(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill
) -> None:
    producer = make_twin(redis_url)
    producer.submit("a" + " " * 20_000 + "b")
    assert mill.claim().request.prompt_ids == (1, 2)


def test_a_changed_tokenizer_is_noticed_after_a_while(
    producer: Twin,
    mill: FakeMill,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill._catalogue.CARD_SECONDS", 0.0)
    producer.submit("b")
    assert mill.claim().request.prompt_ids == (2,)
    FakeMill(redis_client, tokenizer=make_tokenizer("x", "y", "b"))
    producer.submit("b")
    assert mill.claim().request.prompt_ids == (3,)
