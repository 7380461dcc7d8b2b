"""The canonical order of retrieved chunks."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import InvalidRequest
from tidemill.rag import canonical_order, expected_savings

CHUNKS = st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"])
JOBS = st.lists(st.lists(CHUNKS, max_size=5), max_size=8)


def common_prefix(left: Sequence[str], right: Sequence[str]) -> list[str]:
    shared = []
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared.append(one)
    return shared


@given(JOBS, st.integers(0, 6))
def test_every_job_keeps_its_chunks_and_its_first_ones_in_place(
    jobs: list[list[str]], keep_first: int
) -> None:
    ordered = canonical_order(jobs, keep_first=keep_first)
    assert [Counter(job) for job in ordered] == [Counter(job) for job in jobs]
    assert [job[:keep_first] for job in ordered] == [job[:keep_first] for job in jobs]


@given(JOBS, st.randoms(use_true_random=False))
def test_neither_the_order_of_jobs_nor_of_their_chunks_matters(
    jobs: list[list[str]], chance: random.Random
) -> None:
    places = list(range(len(jobs)))
    chance.shuffle(places)
    mixed = [chance.sample(jobs[place], len(jobs[place])) for place in places]
    ordered = canonical_order(jobs)
    assert canonical_order(mixed) == [ordered[place] for place in places]
    assert jobs == [list(job) for job in jobs], "the input is left alone"


@given(st.sets(CHUNKS), st.sets(CHUNKS), st.randoms(use_true_random=False))
def test_two_jobs_share_all_chunks_that_both_have(
    left: set[str], right: set[str], chance: random.Random
) -> None:
    jobs = [chance.sample(sorted(job), len(job)) for job in (left, right)]
    first, second = canonical_order(jobs)
    assert set(common_prefix(first, second)) == left & right


@given(JOBS)
def test_the_chunk_that_most_jobs_hold_comes_first_in_all_of_them(jobs: list[list[str]]) -> None:
    counts = Counter(chunk for job in jobs for chunk in set(job))
    most = max(counts.values(), default=0)
    for job in canonical_order(jobs):
        assert [counts[c] for c in job] == sorted((counts[c] for c in job), reverse=True)
        if any(counts[c] == most for c in job):
            assert counts[job[0]] == most


def test_it_shares_as_much_as_the_best_of_all_orders_of_a_small_set() -> None:
    jobs = [["a" * 9, "b" * 9, "c" * 9], ["c" * 9, "a" * 9], ["b" * 9, "a" * 9, "d" * 9]]

    def shared(some: Sequence[Sequence[str]]) -> int:
        return expected_savings(["".join(job) for job in some]).shared_tokens

    best = max(
        shared([first, second, third])
        for first in permutations(jobs[0])
        for second in permutations(jobs[1])
        for third in permutations(jobs[2])
    )
    assert shared(canonical_order(jobs)) == best > shared(jobs)


def test_random_retrieval_shares_more_on_average_than_as_it_was_retrieved() -> None:
    chance = random.Random(7)
    chunks = [f"{number:04d}" * 8 for number in range(60)]
    weights = [1 / (number + 1) for number in range(60)]
    given_shared, ordered_shared = 0, 0
    for _ in range(20):
        jobs = [list(dict.fromkeys(chance.choices(chunks, weights, k=5))) for _ in range(100)]
        given_shared += expected_savings(["".join(job) for job in jobs]).shared_tokens
        ordered = canonical_order(jobs)
        ordered_shared += expected_savings(["".join(job) for job in ordered]).shared_tokens
    assert ordered_shared > 1.2 * given_shared


def test_kept_chunks_make_groups_that_are_counted_apart() -> None:
    # "z" is in most jobs, but among those that begin with "x" it is "y" that two of them hold.
    jobs = [["x", "z", "y"], ["x", "y", "q"], ["w", "z"], ["w", "z", "v"]]
    first, second, *_ = canonical_order(jobs, keep_first=1)
    assert first == ["x", "y", "z"]
    assert second == ["x", "y", "q"]


def test_chunks_may_be_token_ids() -> None:
    jobs = [[(1, 2), (3,)], [(4,), (3,)], [(3,), (5,)]]
    assert [job[0] for job in canonical_order(jobs)] == [(3,)] * 3


@pytest.mark.parametrize("keep_first", [-1, 1.5, "2", True])
def test_a_bad_number_of_kept_chunks_is_refused(keep_first: int) -> None:
    with pytest.raises(InvalidRequest, match="keep_first: ") as refusal:
        canonical_order([["a"]], keep_first=keep_first)
    assert refusal.value.field == "keep_first"
