"""Jobs that arrive as text are ordered, refused or let through."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import redis
import redis.asyncio
import tokenizers

from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS, SchedulerProcess
from support.shard import KEYS, cancel, entry_of, lead
from support.wait import wait_until, wait_until_async
from tidemill.protocol import calls
from tidemill.protocol.codec import decode
from tidemill.protocol.errors import ConfigError, StaleEpoch
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest, JobEnd
from tidemill.protocol.prefix import hash_blocks, hint_hash, routing_key
from tidemill.service.prompt import extra_keys
from tidemill.service.redis import connect_async
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers, TokenizerStore
from tidemill.service.tokenizer_files import TokenizerFiles
from tidemill_scheduler.intake import tokenize_pool
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.intake.tokenize_pool import TokenizePool

SALT = b"\x07" * 16
WORDS = [f"w{number}" for number in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(["?", *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(TokenizerFiles(raw.to_str()))


@pytest.fixture
def worker(redis_client: redis.Redis, tokenizer: Tokenizer) -> PuppetWorker:
    return PuppetWorker(
        redis_client, tokenizer_digest=tokenizer.digest, bundle=tokenizer.to_bundle()
    )


def submit_text(client: redis.Redis, **values: object) -> str:
    request = GenerateRequest.model_validate({"model": "m"} | values)
    run(client, calls.salt(KEYS, tenant=request.tenant, random=SALT))
    return run(client, calls.submit(KEYS, calls.NewJob(new_job_id(), request))).job_id


def error_of(client: redis.Redis, job_id: str) -> str:
    """Wait until the job has failed; returns why."""
    wait_until(lambda: client.hget(KEYS.job(job_id), "st") == b"failed", LIVENESS_SECONDS)
    [(_, fields)] = client.xrange(KEYS.token_log(job_id))
    return decode(fields[b"e"], JobEnd).error or ""


def test_a_text_job_is_tokenised_and_dispatched(
    leader: SchedulerProcess, redis_client: redis.Redis, worker: PuppetWorker
) -> None:
    job_id = submit_text(redis_client, prompt=" ".join(WORDS))

    [claim] = wait_until(worker.read, LIVENESS_SECONDS)

    assert claim.job_id == job_id
    assert worker.finish(claim).accepted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": " ".join(WORDS * 2)}, "and 600 leave no room"),
        ({"prompt": "w1", "params": {"max_tokens": 9999}}, "9999 after a prompt of 1 are 10000"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "no chat template"),
        ({"prompt": "w1", "tokenizer_digest": "f" * 64}, "tokenizer_digest: "),
        ({"prompt_ids": [1, 50_000]}, "prompt_ids: token id 50000"),
    ],
)
def test_a_job_that_the_model_cannot_run_fails_with_the_field_named(
    leader: SchedulerProcess,
    redis_client: redis.Redis,
    worker: PuppetWorker,
    values: dict[str, object],
    message: str,
) -> None:
    job_id = submit_text(redis_client, **values)

    assert message in error_of(redis_client, job_id)
    assert worker.read() == []
    wait_until(lambda: not redis_client.zcard(KEYS.active_queues), LIVENESS_SECONDS)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


@pytest.fixture
def placed() -> list[WaitingJob]:
    return []


@pytest.fixture
async def pool(
    client: redis.asyncio.Redis, redis_client: redis.Redis, placed: list[WaitingJob]
) -> AsyncIterator[TokenizePool]:
    tokenizers_ = AsyncRedisTokenizers(KEYS, TokenizerStore())
    pool = TokenizePool(
        client,
        KEYS,
        tokenizers_,
        placed.append,
        epoch=lead(redis_client),
        unknown_model_seconds=0.5,
    )
    task = asyncio.create_task(pool.run())
    yield pool
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def pointer_of(client: redis.Redis, job_id: str) -> WaitingJob:
    return WaitingJob(job_id, "p1:default", entry_of(client, job_id), "m")


async def test_key_and_cost_are_those_a_producer_would_have_sent(
    redis_client: redis.Redis,
    worker: PuppetWorker,
    pool: TokenizePool,
    placed: list[WaitingJob],
) -> None:
    params = {"max_tokens": 5}
    job_id = submit_text(redis_client, prompt=" ".join(WORDS), params=params)
    pointer = pointer_of(redis_client, job_id)

    pool.put(pointer)
    await wait_until_async(lambda: placed, LIVENESS_SECONDS)

    ids = list(range(1, 301))
    key = routing_key(hash_blocks(ids, 16, extra_keys(SALT, "r1", None)))
    assert placed == [replace(pointer, key=key, cost=300, max_tokens=5)]
    assert len(key) == 8 * (300 // 64)
    cancel(redis_client, pointer.job_id)


async def test_a_prefix_id_places_a_text_whatever_it_says(
    redis_client: redis.Redis, worker: PuppetWorker, pool: TokenizePool, placed: list[WaitingJob]
) -> None:
    texts = [" ".join(WORDS[:70]), "w1"]
    pointers = [
        pointer_of(redis_client, submit_text(redis_client, prompt=text, prefix_id="p"))
        for text in texts
    ]

    for pointer in pointers:
        pool.put(pointer)
    await wait_until_async(lambda: len(placed) == 2, LIVENESS_SECONDS)

    extra = extra_keys(SALT, "r1", None)
    keys = {job.job_id: (job.hint_depth, job.key, job.kv_key) for job in placed}
    tokens = routing_key(hash_blocks(list(range(1, 71)), 16, extra))
    hint = hint_hash("p", extra)
    assert keys[pointers[0].job_id] == (1, hint + tokens, tokens)
    assert keys[pointers[1].job_id] == (1, hint, b"")
    for pointer in pointers:
        cancel(redis_client, pointer.job_id)


async def test_a_prefix_id_places_a_text_that_cannot_be_tokenised_here(
    redis_client: redis.Redis,
    worker: PuppetWorker,
    pool: TokenizePool,
    placed: list[WaitingJob],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(*_: object) -> Tokenizer:
        raise ConfigError("there is no tokenizer here", fix="Install it.")

    monkeypatch.setattr(AsyncRedisTokenizers, "get", nothing)
    job_id = submit_text(redis_client, prompt="w1 w2", prefix_id="p")

    pool.put(pointer_of(redis_client, job_id))
    await wait_until_async(lambda: placed, LIVENESS_SECONDS)

    [job] = placed
    assert (job.key, job.hint_depth) == (hint_hash("p", extra_keys(SALT, "r1", None)), 1)
    assert job.is_estimated and job.cost > 0
    cancel(redis_client, job_id)


async def test_a_job_whose_tokenizer_is_damaged_fails(
    redis_client: redis.Redis,
    worker: PuppetWorker,
    pool: TokenizePool,
) -> None:
    redis_client.set(KEYS.tokenizer(worker.card.tokenizer_digest), b"junk", ex=60)
    job_id = submit_text(redis_client, prompt="w1")

    pool.put(pointer_of(redis_client, job_id))

    await asyncio.to_thread(error_of, redis_client, job_id)


async def test_a_job_for_a_model_nobody_serves_fails_after_some_patience(
    redis_client: redis.Redis, pool: TokenizePool
) -> None:
    job_id = submit_text(redis_client, prompt="w1")

    pool.put(pointer_of(redis_client, job_id))

    message = await asyncio.to_thread(error_of, redis_client, job_id)
    assert message.startswith("model: no worker serves 'm'")


async def test_a_job_waits_for_the_first_worker_of_its_model(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    placed: list[WaitingJob],
    tokenizer: Tokenizer,
) -> None:
    tokenizers_ = AsyncRedisTokenizers(KEYS, TokenizerStore())
    pool = TokenizePool(
        client, KEYS, tokenizers_, placed.append, epoch=lead(redis_client), unknown_model_seconds=60
    )
    task = asyncio.create_task(pool.run())
    job_id = submit_text(redis_client, prompt="w1")
    pool.put(pointer_of(redis_client, job_id))
    await wait_until_async(lambda: pool.num_parked, LIVENESS_SECONDS)

    PuppetWorker(redis_client, tokenizer_digest=tokenizer.digest, bundle=tokenizer.to_bundle())
    await wait_until_async(lambda: placed, LIVENESS_SECONDS)

    assert placed[0].job_id == job_id
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    cancel(redis_client, job_id)


async def test_a_pool_whose_epoch_is_over_refuses_nothing(
    redis_client: redis.Redis, client: redis.asyncio.Redis, worker: PuppetWorker
) -> None:
    epoch = lead(redis_client)
    redis_client.delete(KEYS.leader)
    assert lead(redis_client, "sch_other") > epoch
    tokenizers_ = AsyncRedisTokenizers(KEYS, TokenizerStore())
    pool = TokenizePool(
        client, KEYS, tokenizers_, lambda _: None, epoch=epoch, unknown_model_seconds=60
    )
    job_id = submit_text(redis_client, prompt_ids=[1, 50_000])

    pool.put(pointer_of(redis_client, job_id))
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(pool.run(), LIVENESS_SECONDS)

    assert redis_client.hget(KEYS.job(job_id), "st") == b"queued"
    cancel(redis_client, job_id)


async def test_a_pause_is_no_patience_with_a_model_that_nobody_serves(
    redis_client: redis.Redis, pool: TokenizePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.put(pointer_of(redis_client, job_id := submit_text(redis_client, prompt="w1")))
    await wait_until_async(lambda: pool.num_parked, LIVENESS_SECONDS)
    looks: list[float] = []

    def monotonic() -> float:
        looks.append(time.monotonic() + 1000)
        return looks[-1]

    monkeypatch.setattr(tokenize_pool, "time", SimpleNamespace(monotonic=monotonic))
    await wait_until_async(lambda: looks and pool.num_parked, LIVENESS_SECONDS)

    assert redis_client.hget(KEYS.job(job_id), "st") == b"queued"
    assert (await asyncio.to_thread(error_of, redis_client, job_id)).startswith("model: no worker")


async def test_a_job_that_ended_meanwhile_is_let_through_to_be_dropped(
    redis_client: redis.Redis, pool: TokenizePool, placed: list[WaitingJob]
) -> None:
    job_id = submit_text(redis_client, prompt="w1")
    pointer = pointer_of(redis_client, job_id)
    cancel(redis_client, job_id)

    pool.put(pointer)
    await wait_until_async(lambda: placed, LIVENESS_SECONDS)

    assert placed == [replace(pointer, cost=1)]


async def test_a_prompt_that_breaks_the_tokenizer_ends_alone(
    redis_client: redis.Redis,
    worker: PuppetWorker,
    pool: TokenizePool,
    placed: list[WaitingJob],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode_or_break(self: Tokenizer, text: str, **options: object) -> list[int]:
        if text == "w1":
            raise ZeroDivisionError
        return [1, 2]

    monkeypatch.setattr(Tokenizer, "encode", encode_or_break)
    breaking = submit_text(redis_client, prompt="w1")
    good = submit_text(redis_client, prompt="w2")

    for job_id in (breaking, good):
        pool.put(pointer_of(redis_client, job_id))

    message = await asyncio.to_thread(error_of, redis_client, breaking)
    assert "ZeroDivisionError" in message
    await wait_until_async(lambda: placed, LIVENESS_SECONDS)
    assert [job.job_id for job in placed] == [good]
    cancel(redis_client, good)


async def test_an_unreadable_card_counts_as_none(
    redis_client: redis.Redis, pool: TokenizePool
) -> None:
    redis_client.hset(KEYS.model("m"), "card", b"junk")
    redis_client.expire(KEYS.model("m"), 60)
    job_id = submit_text(redis_client, prompt="w1")

    pool.put(pointer_of(redis_client, job_id))

    assert "no worker serves" in await asyncio.to_thread(error_of, redis_client, job_id)
