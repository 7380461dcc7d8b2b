"""What a set of prompts shares, beside a cache that is simulated block by block."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import InvalidRequest
from tidemill.rag import Savings, expected_savings

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=8)


def computed(prompts: list[list[int]], block_size: int) -> int:
    """Tokens computed one prompt after another with a cache that forgets nothing."""
    cache: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        hit = 0
        while hit + block_size < len(prompt) and tuple(prompt[: hit + block_size]) in cache:
            hit += block_size
        total += len(prompt) - hit
        for end in range(block_size, len(prompt) + 1, block_size):
            cache.add(tuple(prompt[:end]))
    return total


@given(PROMPTS, st.integers(1, 5))
def test_what_must_be_computed_is_what_a_cache_computes_in_sorted_order(
    prompts: list[list[int]], block_size: int
) -> None:
    savings = expected_savings(prompts, block_size=block_size)
    assert savings.unique_tokens == computed(sorted(prompts), block_size)
    assert savings.total_tokens == sum(map(len, prompts))


@given(PROMPTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_no_other_order_computes_less(
    prompts: list[list[int]], block_size: int, chance: random.Random
) -> None:
    shuffled = chance.sample(prompts, len(prompts))
    unique = expected_savings(prompts, block_size=block_size).unique_tokens
    assert unique <= computed(shuffled, block_size)
    assert unique == expected_savings(shuffled, block_size=block_size).unique_tokens


def test_token_ids_are_counted_in_blocks_of_sixteen_and_text_in_characters() -> None:
    document = list(range(100, 140))
    ids = expected_savings([[*document, 1], [*document, 2]])
    assert ids == Savings(num_prompts=2, total_tokens=82, shared_tokens=32)
    text = expected_savings(["a document, one", "a document, two"])
    assert text.shared_tokens == len("a document, ")
    assert text.bound == pytest.approx(12 / 30)


def test_the_last_token_is_always_computed() -> None:
    twice = expected_savings([[7] * 32, [7] * 32])
    assert twice.unique_tokens == 32 + 16


def test_the_sums_read_as_one_line() -> None:
    told = str(expected_savings(["abcd", "abce"] * 500))
    assert told == "1,000 prompts, 4,000 tokens: 1,003 to compute, 74.9% shared"


def test_nothing_shares_nothing() -> None:
    assert expected_savings([]) == Savings(0, 0, 0)
    assert expected_savings([]).bound == 0.0


@pytest.mark.parametrize("block_size", [0, -16, True, "16", 1.5, float("nan")])
def test_a_block_without_tokens_is_refused(block_size: Any) -> None:
    with pytest.raises(InvalidRequest, match="block_size: "):
        expected_savings([[1]], block_size=block_size)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (None, "prompts"),
        ("abc", "prompts"),
        (iter(["abc"]), "prompts"),
        ({"abc"}, "prompts"),
        ([None], "prompts.0"),
        ([[1], "abc"], "prompts.1"),
        (["abc", [1]], "prompts.1"),
        ([[1, "a"]], "prompts.0.1"),
        ([[1], [-1]], "prompts.1.0"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused_by_its_place(prompts: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        expected_savings(prompts)
    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"{field}: ")
    assert "\n" not in refusal.value.one_line()
