"""What a worker reads of a job before it runs it."""

import hashlib

import pytest
import redis

from support import shard
from support.shard import KEYS
from support.worker_rig import make_card, make_request, make_tokenizer, submit
from tidemill.protocol.messages import CommandKind
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.prompt import extra_keys
from tidemill_gpuworker.shell import claims
from tidemill_gpuworker.shell.claims import Claim, ClaimLoader, Refusal, seed_of
from tidemill_gpuworker.shell.commands import Command
from tidemill_gpuworker.shell.failures import Failure
from tidemill_gpuworker.shell.work_clock import WorkClock

pytestmark = pytest.mark.leaks_keys


@pytest.fixture
def loader(redis_client: redis.Redis) -> ClaimLoader:
    tokenizer = make_tokenizer()
    return ClaimLoader(redis_client, KEYS, "wkr_a", make_card(tokenizer), tokenizer, WorkClock())


def _run(job_id: str, fence: int = 1) -> Command:
    return Command("1-0", CommandKind.RUN, job_id, fence)


def test_a_claim_holds_prompt_salt_and_fence(
    redis_client: redis.Redis, loader: ClaimLoader
) -> None:
    job_id = submit(redis_client, make_request((4, 5), cache_salt="mine", stream=False))
    shard.dispatch(redis_client, job_id, shard.lead(redis_client))
    (claim,) = loader.load([_run(job_id)])
    assert isinstance(claim, Claim)
    assert (claim.job.job_id, claim.job.fence, claim.job.ref.queue) == (job_id, 1, "p1:default")
    assert claim.prompt_ids == (4, 5)
    assert claim.extra_keys == extra_keys(b"\x07" * 16, "r1", "mine")
    assert not claim.job.stream


def test_a_claim_spells_bad_words_and_holds_sampling_against_the_model(
    redis_client: redis.Redis, loader: ClaimLoader
) -> None:
    epoch = shard.lead(redis_client)
    jobs = [
        submit(redis_client, make_request(params=params))
        for params in (
            SamplingParams(bad_words=("water wheel", "mill")),
            SamplingParams(logit_bias=((10**6, 1.0),)),
            SamplingParams(prompt_logprobs=21),
        )
    ]
    for job_id in jobs:
        shard.dispatch(redis_client, job_id, epoch)
    spelled, *refused = loader.load([_run(job_id) for job_id in jobs])
    assert isinstance(spelled, Claim)
    assert spelled.bad_word_ids == ((3, 4), (2,))
    for refusal, field in zip(refused, ("logit_bias", "prompt_logprobs"), strict=True):
        assert isinstance(refusal, Refusal)
        assert refusal.failure.reason.startswith(f"params.{field}: ")
        assert not refusal.failure.may_pass


def test_only_the_present_attempt_of_a_running_job_is_claimed(
    redis_client: redis.Redis, loader: ClaimLoader
) -> None:
    epoch = shard.lead(redis_client)
    running, queued, cancelled = (submit(redis_client, make_request()) for _ in range(3))
    shard.dispatch(redis_client, running, epoch)
    shard.dispatch(redis_client, cancelled, epoch)
    shard.cancel(redis_client, cancelled, "wkr_a")
    commands = [
        _run(running, fence=2),
        _run(queued, fence=0),
        _run(cancelled),
        _run("job_0000000000000000000000000000"),
        _run(running),
    ]
    claims = loader.load(commands)
    assert claims[:4] == [None] * 4
    assert isinstance(claims[4], Claim)


def test_a_job_whose_command_went_to_another_worker_is_not_claimed(
    redis_client: redis.Redis, loader: ClaimLoader
) -> None:
    job_id = submit(redis_client, make_request())
    shard.dispatch(redis_client, job_id, shard.lead(redis_client), worker="wkr_b")
    assert loader.load([_run(job_id)]) == [None]


def test_only_attempts_that_were_loaded_count_as_crashes(
    redis_client: redis.Redis, loader: ClaimLoader
) -> None:
    epoch = shard.lead(redis_client)
    unread = submit(redis_client, make_request())
    loaded = [submit(redis_client, make_request()) for _ in range(300)]
    for job_id in (unread, *loaded):
        shard.dispatch(redis_client, job_id, epoch)
    assert all(isinstance(c, Claim) for c in loader.load([_run(job_id) for job_id in loaded]))
    for job_id in (unread, *loaded):
        shard.expire_lease(redis_client, job_id)
        assert shard.reap(redis_client, job_id) == 1
    assert [redis_client.hget(KEYS.job(job_id), "cr") for job_id in loaded] == [b"1"] * 300
    assert redis_client.hget(KEYS.job(unread), "cr") == b"0"


def test_a_resumed_claim_brings_the_log(redis_client: redis.Redis, loader: ClaimLoader) -> None:
    epoch = shard.lead(redis_client)
    job_id = submit(redis_client, make_request())
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    for start in (0, 2):
        assert shard.append(redis_client, job_id, fence, start, 2).accepted
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1
    assert shard.dispatch(redis_client, job_id, epoch).fence == 2
    (claim,) = loader.load([_run(job_id, fence=2)])
    assert isinstance(claim, Claim)
    assert [chunk.ids for chunk in claim.written] == [(0, 1), (2, 3)]


def test_a_broken_log_fails_the_job(redis_client: redis.Redis, loader: ClaimLoader) -> None:
    epoch = shard.lead(redis_client)
    job_id = submit(redis_client, make_request())
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    assert shard.append(redis_client, job_id, fence, 0, 2).accepted
    redis_client.hset(KEYS.job(job_id), "n", "5")
    (refusal,) = loader.load([_run(job_id)])
    assert isinstance(refusal, Refusal)
    assert "token 2 of 5" in refusal.failure.reason
    assert not refusal.failure.may_pass


def test_a_request_nobody_can_read_is_refused(
    redis_client: redis.Redis, loader: ClaimLoader
) -> None:
    job_id = submit(redis_client, make_request())
    shard.dispatch(redis_client, job_id, shard.lead(redis_client))
    for data, word in ((b"\xff\x80", "version"), (b"\x01\xc1", "msgpack"), (b"", "empty")):
        redis_client.hset(KEYS.job(job_id), "req", data)
        (refusal,) = loader.load([_run(job_id)])
        assert isinstance(refusal, Refusal)
        assert word in refusal.failure.reason
        assert not refusal.failure.may_pass


def test_a_prompt_that_finds_no_memory_may_be_tried_again(
    redis_client: redis.Redis, loader: ClaimLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> tuple[int, ...]:
        raise MemoryError

    monkeypatch.setattr(claims, "tokenize", no_memory)
    epoch = shard.lead(redis_client)
    job_id = submit(redis_client, make_request())
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    assert shard.append(redis_client, job_id, fence, 0, 2).accepted
    (refusal,) = loader.load([_run(job_id)])
    assert isinstance(refusal, Refusal)
    assert refusal.failure == Failure("the prompt cannot be prepared: MemoryError", may_pass=True)
    # What is written already counts as this attempt's, so that it is not lost with the refusal.
    assert [chunk.ids for chunk in refusal.written] == [(0, 1)]


def test_a_seed_is_the_same_for_all_attempts() -> None:
    given = make_request(params=SamplingParams(seed=42))
    assert seed_of("job_1", given) == 42
    digest = hashlib.sha256(b"job_1").digest()
    assert seed_of("job_1", make_request()) == int.from_bytes(digest[:8], "big") % 2**63
