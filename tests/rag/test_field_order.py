"""The order of rows and fields for queries over tables."""

import inspect
import sys
from itertools import pairwise
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import InvalidRequest
from tidemill.rag import OrderedRow, expected_savings, order_fields

VALUES = st.sampled_from(["red", "green", "a long description", "x"])
ROWS = st.lists(st.dictionaries(st.sampled_from(["f", "g", "hh"]), VALUES), max_size=9)


def weight(cells: list[tuple[str, str]]) -> int:
    return sum(len(name) + len(value) for name, value in cells)


def neighbours_share(rows: list[OrderedRow]) -> int:
    total = 0
    for before, row in pairwise(rows):
        for one, other in zip(before.fields, row.fields, strict=False):
            if one != other:
                break
            total += weight([one])
    return total


@given(ROWS)
def test_every_row_is_there_once_with_all_its_fields(rows: list[dict[str, str]]) -> None:
    ordered = order_fields(rows)
    assert sorted(row.index for row in ordered) == list(range(len(rows)))
    for row in ordered:
        assert len(row.fields) == len(rows[row.index])
        assert dict(row.fields) == rows[row.index]


@given(ROWS)
def test_neighbours_share_at_least_what_the_best_single_value_saves(
    rows: list[dict[str, str]],
) -> None:
    cells = [cell for row in rows for cell in row.items()]
    best = max((weight([cell]) * (cells.count(cell) - 1) for cell in cells), default=0)
    assert neighbours_share(order_fields(rows)) >= best


@given(
    st.dictionaries(st.sampled_from("fgh"), VALUES), st.dictionaries(st.sampled_from("fgh"), VALUES)
)
def test_two_rows_share_all_fields_that_are_equal(
    left: dict[str, str], right: dict[str, str]
) -> None:
    common = [cell for cell in left.items() if cell in right.items()]
    assert neighbours_share(order_fields([left, right])) == weight(common)


def test_a_long_value_of_few_rows_goes_before_a_short_one_of_many() -> None:
    rows = [
        {"rating": "5", "product": "p" * 40, "text": "one"},
        {"rating": "5", "product": "q" * 40, "text": "two"},
        {"rating": "1", "product": "p" * 40, "text": "three"},
        {"rating": "5", "product": "q" * 40, "text": "four"},
        {"rating": "5", "product": "r" * 40, "text": "five"},
    ]
    ordered = order_fields(rows)
    assert [row.index for row in ordered] == [0, 2, 1, 3, 4]
    assert ordered[0].fields[0] == ("product", "p" * 40)
    assert ordered[2].fields[:2] == (("product", "q" * 40), ("rating", "5"))
    assert ordered[4].fields == tuple(rows[4].items()), "what nobody shares stays as it was"


def test_length_says_what_a_value_costs() -> None:
    rows = [{"a": "12345678", "b": "x"}, {"a": "12345678", "b": "y"}, {"a": "z", "b": "x"}]
    by_characters = order_fields(rows)
    assert by_characters[0].fields[0] == ("a", "12345678")
    by_words = order_fields(rows, length=lambda text: 9 if text == "x" else 1)
    assert by_words[0].fields[0] == ("b", "x")


def test_values_of_other_types_are_written_out_and_fields_may_lack() -> None:
    [first, second] = order_fields([{"n": 1, "t": True}, {"t": True}])
    assert first.text() == "t: True\nn: 1"
    assert second.text(" | ") == "t: True"


def test_a_large_table_is_ordered_by_its_groups() -> None:
    rows = [{"id": f"{n}", "doc": f"document {n % 100:04d} " * 8} for n in range(10_000)]
    ordered = order_fields(rows)
    texts = [row.text() for row in ordered]
    assert len({row.fields[0] for row in ordered}) == 100
    changes = sum(before.fields[0] != row.fields[0] for before, row in pairwise(ordered))
    assert changes == 99, "each document's rows stand together"
    as_given = ["\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
    assert expected_savings(texts).bound > 0.85 > 0.1 > expected_savings(as_given).bound


def test_groups_may_nest_deeper_than_functions_may_call_each_other() -> None:
    depth = 60
    rows = [{f"f{n:03d}": "x" * (depth - n) for n in range(row + 1)} for row in range(depth)]
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 40)
    try:
        ordered = order_fields(rows)
    finally:
        sys.setrecursionlimit(before)
    # Each row holds all fields of the one before it, so nothing but the last field is ever new.
    assert neighbours_share(ordered) == sum(weight(list(row.items())) for row in rows[:-1])


def test_lengths_may_be_fractions() -> None:
    rows = [{"a": "long", "b": "x"}, {"a": "long", "b": "y"}, {"a": "z", "b": "x"}]
    ordered = order_fields(rows, length=lambda text: 0.75 if text == "x" else 0.25)
    assert ordered[0].fields[0] == ("b", "x")


@pytest.mark.parametrize(
    ("rows", "field", "says"),
    [
        (None, "rows", "NoneType is not a list of mappings"),
        ("abc", "rows", "str is not a list of mappings"),
        ({"a": "b"}, "rows", "dict is not a list of mappings"),
        (iter([{"a": 1}]), "rows", "list_iterator is not a list of mappings"),
        (["abc"], "rows.0", "str is not a mapping"),
        ([{}, None], "rows.1", "NoneType is not a mapping"),
        ([{}, [("a", 1)]], "rows.1", "list is not a mapping"),
        ([{1: "a"}], "rows.0", "int is not the name of a field"),
        ([{None: "a"}], "rows.0", "NoneType is not the name of a field"),
        ([{"a": 10**5000}], "rows.0.a", "it cannot be written as text"),
    ],
)
def test_what_is_no_list_of_rows_is_refused_by_its_place(rows: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        order_fields(rows)
    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"{field}: ")
    assert says in refusal.value.message
    assert "\n" not in refusal.value.one_line()


@pytest.mark.parametrize("cost", [nan, inf, -1, -inf, 10**400, 1e13, None, "3", True])
def test_a_length_that_cannot_be_added_up_is_refused(cost: Any) -> None:
    rows = [{"a": "same"}, {"a": "same"}]
    with pytest.raises(InvalidRequest, match=r"^length: it returned .*not a number") as refusal:
        order_fields(rows, length=lambda text: cost)
    assert refusal.value.field == "length"


@pytest.mark.parametrize("length", [None, nan, 3, "len"])
def test_a_length_that_is_no_function_is_refused(length: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^length: .*is not a function") as refusal:
        order_fields([], length=length)
    assert refusal.value.field == "length"


def test_a_separator_that_is_no_text_is_refused() -> None:
    separator: Any = None
    with pytest.raises(InvalidRequest, match=r"^separator: NoneType is not text"):
        OrderedRow(0, (("a", "b"),)).text(separator)
