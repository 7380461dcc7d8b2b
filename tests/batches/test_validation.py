"""Inputs of batches: read line by line, divided into parts, and judged."""

import io
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.batch_shop import ENDPOINT, jsonl, request_line
from tidemill.batches.lines import RequestLine, parse_line, read_lines
from tidemill.batches.validation import (
    MAX_ERRORS,
    PART_BYTES,
    PART_LINES,
    read_part,
    survey,
)
from tidemill.protocol.batches import MAX_LINE_BYTES, MAX_LINES


def surveyed(*lines: object):  # type: ignore[no-untyped-def]
    return survey(io.BytesIO(jsonl(lines)), ENDPOINT)


@given(
    st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"\n", b"")), max_size=20),
    st.booleans(),
)
def test_lines_are_where_they_are_said_to_be(lines: list[bytes], ends: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    found = list(read_lines(io.BytesIO(data)))
    assert b"".join(line.data or b"" for line in found) == data
    assert [line.number for line in found] == list(range(1, len(found) + 1))
    for line in found:
        assert data[line.offset : line.offset + line.num_bytes] == line.data
        [again, *_] = read_lines(io.BytesIO(data), offset=line.offset, number=line.number)
        assert again == line


def test_a_line_of_the_largest_size_is_read_and_a_longer_one_is_passed_over() -> None:
    fits, long = b"x" * MAX_LINE_BYTES, b"y" * (5 * MAX_LINE_BYTES)
    first, second, third = read_lines(io.BytesIO(fits + b"\n" + long + b"\nz"))
    assert first.data == fits + b"\n"
    assert (second.data, second.num_bytes) == (None, len(long) + 1)
    assert (third.data, third.offset) == (b"z", len(fits) + len(long) + 2)


@given(st.integers(0, 700), st.integers(0, 9))
def test_the_parts_of_an_input_hold_each_of_its_requests_once(num: int, blank_every: int) -> None:
    lines = [
        b"" if blank_every and n % (blank_every + 1) == 0 else request_line(n) for n in range(num)
    ]
    data = jsonl(lines)
    found = survey(io.BytesIO(data), ENDPOINT)
    layout = tuple(found.layout)
    parts = [read_part(io.BytesIO(data), ENDPOINT, layout, n) for n in range(len(layout))]
    assert all(1 <= len(part) <= PART_LINES for part in parts)
    ids = [line.custom_id for part in parts for line in part]
    assert ids == [line["custom_id"] for line in lines if isinstance(line, dict)]
    assert found.total == len(ids)


def test_a_part_of_long_lines_has_fewer_of_them() -> None:
    text = "x" * (MAX_LINE_BYTES - 1000)
    found = surveyed(*(request_line(n, prompt=text) for n in range(7)))
    starts = [offset for offset, _ in found.layout]
    assert [line for _, line in found.layout] == [1, 3, 5, 7]
    assert all(b - a <= PART_BYTES for a, b in itertools.pairwise(starts))


def test_an_input_of_the_most_requests_is_valid_and_one_more_is_not() -> None:
    lines = [json.dumps(request_line(n)).encode() for n in range(MAX_LINES)]
    assert not surveyed(*lines).errors
    [error] = surveyed(*lines, request_line(MAX_LINES)).errors
    assert (error.code, error.line) == ("too_many_tasks", MAX_LINES + 1)


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n"])
def test_an_input_without_requests_is_invalid(data: bytes) -> None:
    [error] = survey(io.BytesIO(data), ENDPOINT).errors
    assert (error.code, error.line) == ("empty_file", None)


def test_of_very_many_errors_the_first_are_told_and_the_others_counted() -> None:
    found = surveyed(*[b"x"] * (MAX_ERRORS + 7))
    assert len(found.errors) == MAX_ERRORS + 1
    assert found.errors[-1].message.startswith("7 more")


def test_the_model_is_told_if_all_lines_name_the_same() -> None:
    assert surveyed(request_line(1), request_line(2)).model == "m"
    assert surveyed(request_line(1), request_line(2, model="other")).model == ""


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id"),
        ({"custom_id": ["a"]}, "invalid_custom_id"),
        ({"custom_id": "a\ud800"}, "invalid_custom_id"),
        ({"method": "post"}, "invalid_method"),
        ({"url": "/v1/chat/completions"}, "invalid_url"),
        ({"body": []}, "invalid_body"),
        ({"body": None}, "missing_required_parameter"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], code: str) -> None:
    [error] = surveyed({**request_line(1), **change}).errors
    [name] = change
    assert (error.code, error.param, error.line) == (code, name, 1)


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reading_of_a_line(data: bytes) -> None:
    for line in read_lines(io.BytesIO(data)):
        parsed = parse_line(line, ENDPOINT)
        assert isinstance(parsed, RequestLine) or parsed


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b'{"custom_id": "\\ud800", "body": {}}'],
)
def test_deep_and_odd_json_is_an_error_of_its_line(data: bytes) -> None:
    [line] = read_lines(io.BytesIO(data))
    assert isinstance(parse_line(line, ENDPOINT), list)


def test_a_mark_of_the_encoding_before_the_first_line_is_no_error() -> None:
    data = b"\xef\xbb\xbf" + jsonl([request_line(1)])
    assert not survey(io.BytesIO(data), ENDPOINT).errors
