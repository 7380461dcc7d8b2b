"""The canonical order of retrieved chunks."""

import random
from collections import Counter, namedtuple
from collections.abc import Sequence
from itertools import permutations
from typing import Any

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


def test_ids_and_a_text_that_reads_like_them_have_places_of_their_own() -> None:
    one = canonical_order([[(1, 2), "(1, 2)"]])
    assert one == canonical_order([["(1, 2)", (1, 2)]])


def test_named_tuples_are_ordered_as_the_plain_ones_that_equal_them() -> None:
    span = namedtuple("span", "first last")
    plain = [[(first, 9) for first in range(20)]]
    named = [[span(first, 9) for first in range(20)]]
    assert canonical_order(named) == canonical_order(plain)


def test_a_chunk_is_hashed_once_however_many_jobs_hold_it() -> None:
    class Passage(str):
        encodings = 0

        def encode(self, *args: str) -> bytes:
            Passage.encodings += 1
            return super().encode(*args)

    passages = [Passage(name) for name in "abc"]
    jobs = [[passages[n % 3], passages[(n + 1) % 3]] for n in range(30)]
    canonical_order(jobs, keep_first=1)
    assert Passage.encodings == 3


@pytest.mark.parametrize(
    "keep_first", [-1, pytest.param(-(10**5000), id="huge"), 1.5, "2", True, None, float("nan")]
)
def test_a_bad_number_of_kept_chunks_is_refused(keep_first: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^keep_first: .*a number of chunks") as refusal:
        canonical_order([["a"]], keep_first=keep_first)
    assert refusal.value.field == "keep_first"
    assert "\n" not in refusal.value.one_line()


@pytest.mark.parametrize(
    ("jobs", "field", "says"),
    [
        (None, "jobs_chunks", "NoneType is not a list of jobs"),
        ("abc", "jobs_chunks", "str is not a list of jobs"),
        (iter([["a"]]), "jobs_chunks", "list_iterator is not a list of jobs"),
        ({"a": ["b"]}, "jobs_chunks", "dict is not a list of jobs"),
        (["abc"], "jobs_chunks.0", "str is not a list of chunks"),
        ([["a"], b"abc"], "jobs_chunks.1", "bytes is not a list of chunks"),
        ([["a"], {"b"}], "jobs_chunks.1", "set is not a list of chunks"),
        ([None], "jobs_chunks.0", "NoneType is not a list of chunks"),
        ([(chunk for chunk in "ab")], "jobs_chunks.0", "generator is not a list of chunks"),
        ([["a", None]], "jobs_chunks.0.1", "NoneType is not a chunk"),
        ([["a"], [[1, 2]]], "jobs_chunks.1.0", "list is not a chunk"),
        ([[1]], "jobs_chunks.0.0", "int is not a chunk"),
        ([[b"a"]], "jobs_chunks.0.0", "bytes is not a chunk"),
        ([[(1, [2])]], "jobs_chunks.0.0.1", "list is not a token id"),
        ([[(1,), (True,)]], "jobs_chunks.0.1.0", "bool is not a token id"),
        ([[(1, -1)]], "jobs_chunks.0.0.1", "-1 is not a token id, from 0 to 2147483647"),
        ([[(2**31,)]], "jobs_chunks.0.0.0", "2147483648 is not a token id, from 0 to 2147483647"),
        ([[(10**5000,)]], "jobs_chunks.0.0.0", "is not a token id, from 0 to 2147483647"),
    ],
)
def test_what_is_no_list_of_chunks_is_refused_by_its_place(
    jobs: Any, field: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        canonical_order(jobs)
    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"{field}: ")
    assert says in refusal.value.message
    assert "\n" not in refusal.value.one_line()
