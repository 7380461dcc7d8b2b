"""Guesses from earlier occurrences, against a search that looks at every place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemill_gpuworker.speculation.ngram import TokenHistory, propose

CONTEXTS = st.lists(st.integers(0, 2), max_size=40)


def slowly_proposed(context: list[int], num_tokens: int, shortest: int, longest: int) -> list[int]:
    """The definition: longest suffix first, latest occurrence first."""
    for length in range(longest, shortest - 1, -1):
        if length >= len(context):
            continue
        for end in range(len(context) - 1, length - 1, -1):
            if context[end - length : end] == context[-length:]:
                text = list(context)
                for place in range(num_tokens):
                    text.append(text[end + place])
                return text[len(context) :]
    return []


@given(CONTEXTS, st.integers(1, 8), st.integers(1, 5), st.integers(0, 4))
def test_the_guess_follows_the_latest_occurrence_of_the_longest_suffix(
    context: list[int], num_tokens: int, shortest: int, more: int
) -> None:
    found = propose(np.array(context, np.int64), num_tokens, shortest, shortest + more)

    assert found == slowly_proposed(context, num_tokens, shortest, shortest + more)


def test_a_period_goes_on_behind_the_end() -> None:
    context = np.array([9, 1, 2, 3, 1, 2, 3], np.int64)

    assert propose(context, 7, 2, 5) == [1, 2, 3, 1, 2, 3, 1]


def test_what_never_came_before_gives_no_guess() -> None:
    assert propose(np.arange(30), 5, 1, 5) == []


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=300), max_size=6))
def test_a_history_holds_what_was_appended(parts: list[list[int]]) -> None:
    history = TokenHistory()
    for part in parts:
        history.extend(part)

    assert history.tokens.tolist() == [token for part in parts for token in part]
