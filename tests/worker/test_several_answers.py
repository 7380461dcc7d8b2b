"""Jobs of several outputs through a whole worker: log, result and takeover."""

import pytest
import redis

from support import shard
from support.fake_engine import alternatives, generate, next_token
from support.shard import KEYS, read_log
from support.wait import wait_until
from support.worker_rig import Rig, make_request, result_of
from tidemill._await_result import ResultFollower
from tidemill._follow import Chunk, stored_chunks
from tidemill._reads import LogEntry, LogPage, Outcome
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import GenerateRequest, TokenChunk
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import JobState
from tidemill.result import from_stored

PROMPT = (1, 2, 3, 4, 5, 6)
NUM_TOKENS = 12


def request(n: int = 3, **params: object) -> GenerateRequest:
    fields = {"n": n, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 1} | params
    return make_request(PROMPT, params=SamplingParams.model_validate(fields))


def expected(choice: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return generate(PROMPT, num_tokens, choice=choice)


def chunks_of(client: redis.Redis, job_id: str) -> list[TokenChunk]:
    entries = client.xrange(KEYS.token_log(job_id))
    return [decode(fields[b"d"], TokenChunk) for _, fields in entries if b"d" in fields]


def check_log(client: redis.Redis, job_id: str, choices: dict[int, list[int]]) -> None:
    position, told = 0, {choice: list[int]() for choice in choices}
    for chunk in chunks_of(client, job_id):
        assert chunk.start == position and chunk.end == position + len(chunk.ids)
        position = chunk.end
        told[chunk.choice] += chunk.ids
    assert told == choices
    assert read_log(client, job_id).terminals == ["done"]


def test_the_log_tells_each_choice_without_a_gap(rig: Rig, redis_client: redis.Redis) -> None:
    rig.runner.run_free()
    job_id = rig.give(request())
    rig.wait_for(job_id, "done")
    check_log(redis_client, job_id, {choice: expected(choice) for choice in range(3)})


def test_the_result_has_every_choice_and_the_chunks_of_the_log(
    rig: Rig, redis_client: redis.Redis
) -> None:
    rig.runner.run_free()
    job_id = rig.give(request())
    rig.wait_for(job_id, "done")
    stored = result_of(redis_client, job_id)
    result = from_stored(job_id, stored)
    assert [list(choice.token_ids) for choice in result.choices] == [
        expected(choice) for choice in range(3)
    ]
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in result.choices} == {"length"}
    assert (result.token_ids, result.text) == (
        result.choices[0].token_ids,
        result.choices[0].text,
    )
    assert result.usage.prompt_tokens == len(PROMPT)
    assert result.usage.completion_tokens == 3 * NUM_TOKENS
    live = [_shape(chunk) for chunk in chunks_of(redis_client, job_id)]
    assert [_shape(chunk) for chunk in stored_chunks(stored)] == live


def _shape(chunk: Chunk | TokenChunk) -> tuple[object, ...]:
    return (chunk.start, chunk.end, chunk.ids, chunk.text, chunk.choice)


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_a_taken_over_job_goes_on_with_each_choice(
    rig: Rig, redis_client: redis.Redis, redis_url: str, num_steps: int
) -> None:
    job_id = rig.give(request())
    rig.runner.allow(num_steps)
    rig.wait_for_tokens(job_id, 3)
    rig.take_away(job_id)
    second = Rig(redis_client, redis_url, rig.epoch)
    second.runner.run_free()
    with second.running():
        second.dispatch(job_id)
        second.wait_for(job_id, "done")
    check_log(redis_client, job_id, {choice: expected(choice) for choice in range(3)})


def test_the_best_are_told_at_the_end_alone(rig: Rig, redis_client: redis.Redis) -> None:
    job_id = rig.give(request(2, best_of=4))
    rig.runner.allow(NUM_TOKENS - 1)
    figures = rig.engine.figures
    wait_until(lambda: figures.num_generated_tokens == 4 * (NUM_TOKENS - 1), what="all steps ran")
    assert not chunks_of(redis_client, job_id)
    rig.runner.run_free()
    rig.wait_for(job_id, "done")
    result = from_stored(job_id, result_of(redis_client, job_id))
    scores = [choice.score for choice in result.choices]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert result.logprobs is None
    assert result.usage.completion_tokens == 4 * NUM_TOKENS


def test_a_group_counts_as_many_sequences(rig: Rig) -> None:
    job_id = rig.give(request(4, max_tokens=100))
    rig.step_until(lambda: rig.last_status().num_running == 4)
    rig.runner.run_free()
    rig.wait_for(job_id, "done")


def test_a_cancelled_group_leaves_the_engine(rig: Rig, redis_client: redis.Redis) -> None:
    job_id = rig.give(request(4))
    rig.runner.allow(3)
    rig.wait_for_tokens(job_id, 4)
    assert shard.cancel(redis_client, job_id, rig.worker_id)[0] == 1
    rig.step_until(lambda: not rig.engine.has_work)
    blocks = rig.engine.step_scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks
    follower = ResultFollower(job_id)
    follower.take_reply(Outcome(JobState.CANCELLED, None))
    entries = redis_client.xrange(KEYS.token_log(job_id))
    page = tuple(LogEntry(entry_id.decode(), fields) for entry_id, fields in entries)
    follower.take_reply(LogPage(JobState.CANCELLED, page))
    assert follower.result is not None
    for choice in follower.result.choices:
        assert list(choice.token_ids) == expected(choice.index)[: len(choice.token_ids)]


def test_a_poisoned_group_fails_alone(rig: Rig, redis_client: redis.Redis) -> None:
    rig.runner.poison = {99}
    rig.runner.run_free()
    bad = rig.give(make_request((99, 1), params=request().params))
    good = rig.give(request())
    rig.wait_for(good, "done")
    rig.exhaust(bad)
    check_log(redis_client, good, {choice: expected(choice) for choice in range(3)})


def beams(width: int) -> list[list[int]]:
    """The likeliest outputs, the best first."""
    found: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(NUM_TOKENS):
        longer = [
            ([*ids, token], logprob + more)
            for ids, logprob in found
            for token, more in alternatives(next_token([*PROMPT, *ids]), 2 * width)
        ]
        found = sorted(longer, key=lambda pair: -pair[1])[:width]
    return [ids for ids, _ in found]


def test_beams_are_told_at_the_end_and_by_whoever_takes_the_job_over(
    rig: Rig, redis_client: redis.Redis, redis_url: str
) -> None:
    job_id = rig.give(request(2, best_of=3, use_beam_search=True, seed=None))
    rig.runner.allow(5)
    wait_until(lambda: rig.engine.figures.num_steps == 5, what="some steps ran")
    assert not chunks_of(redis_client, job_id)
    rig.take_away(job_id)
    second = Rig(redis_client, redis_url, rig.epoch)
    second.runner.run_free()
    with second.running():
        second.dispatch(job_id)
        second.wait_for(job_id, "done")
    best = beams(3)[:2]
    check_log(redis_client, job_id, dict(enumerate(best)))
    result = from_stored(job_id, result_of(redis_client, job_id))
    assert [list(choice.token_ids) for choice in result.choices] == best
    assert result.usage.completion_tokens == 2 * NUM_TOKENS
    blocks = second.engine.step_scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks
