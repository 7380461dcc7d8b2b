"""Best of n: many candidates for one prompt."""

from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, Attempt, FakeMill
from support.twins import MakeTwin, Twin
from tidemill import (
    IdempotencyConflict,
    InvalidRequest,
    JobFailed,
    JobNotFinished,
    QueueFull,
    Result,
    SamplingParams,
)


def claim_all(mill: FakeMill, num: int) -> list[Attempt]:
    return [mill.claim() for _ in range(num)]


def seeds(attempts: list[Attempt]) -> list[int | None]:
    return [attempt.request.params.seed for attempt in attempts]


def length(result: Result) -> int:
    return len(result.token_ids)


def test_candidates_are_one_prompt_with_seeds_of_their_own(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    best = producer.submit_best_of("a b c " * 50, n=5, seed=7, max_tokens=9, priority=1)
    attempts = claim_all(mill, 5)
    assert [attempt.job_id for attempt in attempts] == [job.id for job in best.jobs]
    assert seeds(attempts)[0] == 7, "the best of one is the job itself"
    assert len(set(seeds(attempts))) == 5
    requests = [attempt.request for attempt in attempts]
    without_seeds = {
        request.model_copy(update={"params": request.params.model_copy(update={"seed": None})})
        for request in requests
    }
    assert len(without_seeds) == 1
    assert (requests[0].params.max_tokens, requests[0].stream) == (9, False)
    assert len({redis_client.hget(KEYS.job(job.id), "h") for job in best.jobs}) == 1


def test_the_seeds_follow_from_the_one_that_is_given(producer: Twin, mill: FakeMill) -> None:
    found = []
    for options in ({"seed": 7}, {"params": SamplingParams(seed=7)}, {"seed": 8}, {}, {}):
        producer.submit_best_of([1], n=3, **options)
        found.append(seeds(claim_all(mill, 3)))
    assert found[0] == found[1]
    others = [seed for some in found[1:] for seed in some]
    assert len(set(others)) == 12


def test_results_come_in_the_order_of_the_candidates(producer: Twin, mill: FakeMill) -> None:
    best = producer.submit_best_of([1], n=3)
    attempts = claim_all(mill, 3)
    for attempt, size in zip(reversed(attempts), (1, 3, 2), strict=True):
        attempt.finish(size)
    assert [length(result) for result in best.results(timeout=10)] == [2, 3, 1]
    assert length(best.best(length)) == 3
    assert best.best(lambda result: 0).job_id == best.jobs[0].id, "the first of equals"


def test_a_failed_candidate_does_not_take_part(producer: Twin, mill: FakeMill) -> None:
    best = producer.submit_best_of([1], n=2)
    first, second = claim_all(mill, 2)
    first.finish(5, state="failed", error="broken")
    second.finish(2)
    assert length(best.best(length, timeout=10)) == 2
    with pytest.raises(JobFailed, match="broken"):
        best.results()


def test_if_all_have_failed_the_first_ones_error_is_told(producer: Twin, mill: FakeMill) -> None:
    best = producer.submit_best_of([1], n=2)
    for attempt, reason in zip(claim_all(mill, 2), ("one", "two"), strict=True):
        attempt.finish(state="failed", error=reason)
    with pytest.raises(JobFailed, match="one"):
        best.best(length)


def test_one_timeout_bounds_the_wait_for_all(producer: Twin, mill: FakeMill) -> None:
    best = producer.submit_best_of([1], n=3)
    with pytest.raises(JobNotFinished):
        best.results(timeout=0.05)
    assert best.cancel() == ["cancelled"] * 3
    with pytest.raises(InvalidRequest, match="timeout"):
        best.best(length, timeout="soon")


def test_the_same_key_finds_the_same_candidates(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    first = producer.submit_best_of([1], n=3, idempotency_key="k")
    again = producer.submit_best_of([1], n=3, idempotency_key="k")
    more = producer.submit_best_of([1], n=4, idempotency_key="k")
    ids = [job.id for job in first.jobs]
    assert [job.id for job in again.jobs] == ids
    assert not any(job.is_new for job in again.jobs)
    assert [job.id for job in more.jobs[:3]] == ids and more.jobs[3].is_new
    assert redis_client.hget(KEYS.counters, "q:default") == b"4"
    with pytest.raises(IdempotencyConflict):
        producer.submit_best_of([2], n=3, idempotency_key="k")


def test_two_callers_with_one_key_share_the_candidates(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill
) -> None:
    bests = [make_twin(redis_url).submit_best_of([1], n=3, idempotency_key="k") for _ in range(2)]
    ids = [[job.id for job in best.jobs] for best in bests]
    assert ids[0] == ids[1]


def test_a_refused_candidate_takes_the_others_along(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.settings, "jobs:default", 2)
    with pytest.raises(QueueFull):
        producer.submit_best_of([1], n=4)
    assert redis_client.hget(KEYS.counters, "q:default") is None, "nothing is left waiting"
    redis_client.delete(KEYS.settings)


def test_with_a_key_a_refused_call_is_made_again_and_adds_what_is_missing(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.settings, "jobs:default", 2)
    with pytest.raises(QueueFull):
        producer.submit_best_of([1], n=4, idempotency_key="k")
    assert redis_client.hget(KEYS.counters, "q:default") == b"2"
    redis_client.delete(KEYS.settings)
    best = producer.submit_best_of([1], n=4, idempotency_key="k")
    assert [job.is_new for job in best.jobs] == [False, False, True, True]
    assert redis_client.hget(KEYS.counters, "q:default") == b"4"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": "8"}, "n"),
        ({"n": 10**5000}, "n"),
        ({"temperature": 0.0}, "temperature"),
        ({"params": SamplingParams(temperature=0)}, "temperature"),
        ({"top_k": 1}, "top_k"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 253}, "idempotency_key"),
        ({"idempotency_key": 5}, "idempotency_key"),
        ({"idempotency_key": "front:1"}, "idempotency_key"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
    ],
)
def test_what_makes_no_candidates_is_refused_and_queues_nothing(
    producer: Twin,
    mill: FakeMill,
    redis_client: redis.Redis,
    options: dict[str, Any],
    field: str,
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        producer.submit_best_of([1], **options)
    assert refusal.value.field == field
    assert redis_client.hget(KEYS.counters, "q:default") is None


def test_the_best_of_one_may_be_greedy(producer: Twin, mill: FakeMill) -> None:
    best = producer.submit_best_of([1], n=1, temperature=0.0)
    mill.claim().finish(2)
    assert length(best.best(length)) == 2
