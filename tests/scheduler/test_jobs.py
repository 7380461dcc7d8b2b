"""Reading pointers: what is accepted and what is refused, with the field named."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.ids import new_job_id
from tidemill_scheduler.intake.jobs import WaitingJob, entry_number, is_queue_name, parse_pointer

JOB_ID = new_job_id()
GOOD = {b"j": JOB_ID.encode(), b"h": b"12345678", b"c": b"70", b"m": b"m", b"a": b"2", b"p": b"-3"}


def parse(**changes: bytes | None) -> WaitingJob:
    fields = GOOD | {name.encode(): value for name, value in changes.items()}
    return parse_pointer("00", "p0:t", "5-1", {k: v for k, v in fields.items() if v is not None})


def test_a_pointer_becomes_a_waiting_job() -> None:
    expected = WaitingJob(JOB_ID, "p0:t", "5-1", "m", b"12345678", 70, 2, -3)

    assert parse() == expected
    assert expected.is_tokenized
    assert expected.sort_key == (b"12345678", 5, 1, JOB_ID)


def test_a_pointer_tells_what_bounds_its_job() -> None:
    fields = GOOD | {b"o": b"64", b"d": b"1700000002500", b"g": b"1", b"s": b"8"}

    job = parse_pointer("00", "p0:t", "5-1", fields, 5.0, clock_offset=-1_700_000_000.0)

    assert (job.max_tokens, job.hint_depth, job.num_outputs) == (64, 1, 8)
    assert job.deadline == pytest.approx(2.5)


@pytest.mark.parametrize("zeros", [{}, {"o": b"0", "d": b"0", "g": b"0", "s": b"0"}])
def test_a_pointer_without_bounds_makes_a_job_without(zeros: dict[str, bytes]) -> None:
    job = parse(**zeros)

    assert (job.max_tokens, job.deadline, job.hint_depth) == (0, math.inf, 0)
    assert job.num_outputs == 1


def test_a_job_of_no_cost_was_not_tokenised() -> None:
    assert not parse(h=b"", c=b"0").is_tokenized


@pytest.mark.parametrize("field", ["j", "h", "c", "m", "a", "p"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(MalformedMessage, match=f"^{field}: missing"):
        parse(**{field: None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("j", b"job_1"),
        ("j", b"\xff"),
        ("j", b"job_01" + b"0" * 26),
        ("h", b"1234567"),
        ("h", b"12345678" * 70_000),
        ("c", b"-1"),
        ("c", b"1.5"),
        ("c", b"9" * 5000),
        ("m", b""),
        ("m", b"\xff"),
        ("a", b""),
        ("p", b"2147483648"),
        ("o", b"2147483648"),
        ("d", b"-1"),
        ("d", b"inf"),
        ("g", b"2"),
    ],
)
def test_a_field_out_of_bounds_is_named(field: str, value: bytes) -> None:
    with pytest.raises(MalformedMessage, match=f"^{field}: "):
        parse(**{field: value})


@given(
    st.dictionaries(st.sampled_from([*GOOD, b"o", b"d", b"g", b"s", b"x"]), st.binary(max_size=40))
)
def test_any_bytes_are_either_read_or_refused(fields: dict[bytes, bytes]) -> None:
    try:
        job = parse_pointer("00", "p1:t", "5-1", GOOD | fields)
    except MalformedMessage:
        return
    assert job.job_id


def test_entry_ids_compare_as_numbers() -> None:
    assert entry_number("9-10") > entry_number("9-9")
    assert entry_number("10-0") > entry_number("9-9")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("p1:default", True), ("p3:default", False), ("p1:", False), ("p1:a b", False), ("", False)],
)
def test_only_class_and_tenant_make_a_queue_name(name: str, expected: bool) -> None:
    assert is_queue_name(name) is expected
