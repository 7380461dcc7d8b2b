"""Stop strings are found across token borders, and nothing else is held back for them."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_gpuworker.engine.stop_checker import Released, StopStrings

stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
texts = st.text("abc", max_size=30)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """By brute force: the start and value of the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def could_begin_a_stop(tail: str, stops: Sequence[str]) -> bool:
    return any(len(tail) < len(stop) and stop.startswith(tail) for stop in stops)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(borders)]


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=10))
@pytest.mark.parametrize("include", [True, False])
def test_the_text_ends_at_the_first_stop_wherever_tokens_are_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    finder = StopStrings(stops, include_in_output=include)
    told, found = "", None
    for piece in cut(text, cuts):
        released = finder.push(piece)
        told += released.text
        if released.stop is not None:
            found = released.stop
            break
    expected = first_stop(text, stops)
    if expected is None:
        assert found is None
        assert told + finder.flush() == text
    else:
        start, stop = expected
        assert found == stop
        assert told == text[: start + len(stop) if include else start]


@given(text=texts, stops=stop_lists)
def test_only_the_longest_possible_beginning_of_a_stop_is_held_back(
    text: str, stops: list[str]
) -> None:
    finder = StopStrings(stops)
    told = ""
    for end, character in enumerate(text, 1):
        released = finder.push(character)
        if released.stop is not None:
            return
        told += released.text
        held = text[len(told) : end]
        assert text.startswith(told)
        assert not held or could_begin_a_stop(held, stops)
        longer = [text[start:end] for start in range(len(told))]
        assert not any(could_begin_a_stop(tail, stops) for tail in longer)


def test_without_stop_strings_text_passes_straight_through() -> None:
    finder = StopStrings(())
    assert finder.push("anything") == Released("anything")
    assert finder.flush() == ""


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    finder = StopStrings(["\n\nQ:"])
    assert finder.push("A.\n") == Released("A.")
    assert finder.push("\n") == Released("")
    assert finder.push("Q") == Released("")
    assert finder.push("uite") == Released("\n\nQuite")


def test_a_stop_that_is_complete_while_it_may_not_stop_is_ignored_for_good() -> None:
    finder = StopStrings(["END"])
    assert finder.push("xEND", may_stop=False) == Released("xEND")
    assert finder.push("yE") == Released("y")
    assert finder.push("ND") == Released("", "END")


def test_a_stop_that_begins_while_it_may_not_stop_counts_when_it_is_complete_later() -> None:
    finder = StopStrings(["END"])
    assert finder.push("EN", may_stop=False) == Released("")
    assert finder.push("D") == Released("", "END")


def test_text_after_the_stop_in_the_same_token_is_dropped() -> None:
    assert StopStrings(["."], include_in_output=True).push("a.b.c") == Released("a.", ".")
    assert StopStrings(["."]).push("a.b.c") == Released("a", ".")
