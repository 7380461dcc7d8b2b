"""Refusals of what is no list of chunks, no row, no count; each names its place in the input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import cast

from tidemill._checks import shown
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.values import MAX_COUNT

#: Longest value that ``order_fields`` can add up without loss, in whatever unit it counts.
MAX_LENGTH = 10**12

_TEXTS = frozenset({str})
_INTS = frozenset({int})


@dataclass(frozen=True, slots=True)
class _Checked:
    """Token ids that need no second look: objects by identity, and the values they have.

    Types have to be looked at in each object, since (True,) equals (1,); the range once per value.
    The objects are kept so that no other one gets the same identity.
    """

    objects: dict[int, object]
    values: set[tuple[int, ...]]


def wrong_kind(field: str, value: object, wanted: str, fix: str = "") -> InvalidRequest:
    """Return the error for a value of another type than the one that is asked for."""
    return InvalidRequest(f"{field}: {type(value).__name__} is not {wanted}", field=field, fix=fix)


def check_list(value: object, field: str, of: str) -> None:
    """Refuse all but sequences; a text is one too, but its letters are hardly what was meant."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise wrong_kind(field, value, f"a list of {of}", "Give a list or a tuple.")


def check_text(value: object, field: str) -> None:
    """Refuse what is not a text."""
    if not isinstance(value, str):
        raise wrong_kind(field, value, "text")


def check_count(value: object, field: str, of: str, *, least: int) -> None:
    """Refuse what is not an int of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_kind(field, value, f"a number of {of}")
    if value < least:
        raise InvalidRequest(
            f"{field}: {shown(value)} is not a number of {of}, at least {least}", field=field
        )


def checked_length(value: object) -> float:
    """Return what a caller's ``length`` returned, if it is a number that can be added up."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(
            f"length: it returned {type(value).__name__}, not a number", field="length"
        )
    # Small ints of other libraries would overflow when they are added.
    number = int(value) if isinstance(value, Integral) else cast(float, value)
    # False for NaN too, which is equal to nothing and would never be found again.
    if not 0 <= number <= MAX_LENGTH:
        raise InvalidRequest(
            f"length: it returned {shown(number)}, not a number from 0 to {MAX_LENGTH}",
            field="length",
        )
    return float(number) if not isinstance(number, int) else number


def check_rows(rows: object, field: str) -> None:
    """Refuse all but a sequence of mappings from names to values."""
    check_list(rows, field, "mappings from names to values")
    assert isinstance(rows, Sequence)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise wrong_kind(f"{field}.{index}", row, "a mapping from names to values")
        for name in row:
            if not isinstance(name, str):
                raise wrong_kind(f"{field}.{index}", name, "the name of a field: names are text")


def check_jobs(jobs_chunks: object, *, text_only: bool = False) -> None:
    """Refuse all but a sequence of sequences of chunks."""
    check_list(jobs_chunks, "jobs_chunks", "jobs")
    assert isinstance(jobs_chunks, Sequence)
    checked = _Checked({}, set())
    for index, chunks in enumerate(jobs_chunks):
        field = f"jobs_chunks.{index}"
        check_list(chunks, field, "chunks")
        if not _TEXTS.issuperset(map(type, chunks)):
            _check_chunks(chunks, field, checked, text_only=text_only)


def _check_chunks(
    chunks: Sequence[object], field: str, checked: _Checked, *, text_only: bool
) -> None:
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, str) or id(chunk) in checked.objects:
            continue
        place = f"{field}.{index}"
        if text_only:
            raise wrong_kind(place, chunk, "text")
        if not isinstance(chunk, tuple):
            raise wrong_kind(place, chunk, "a chunk: text, or a tuple of token ids")
        _check_types_of_ids(chunk, place)
        if chunk not in checked.values:
            _check_range_of_ids(chunk, place)
            checked.values.add(chunk)
        checked.objects[id(chunk)] = chunk


def check_ids(ids: Sequence[object], field: str) -> None:
    """Refuse token ids that are not ints from 0 to 2^31 - 1; True and 1.0 would pass for 1."""
    _check_types_of_ids(ids, field)
    _check_range_of_ids(cast(Sequence[int], ids), field)


def _check_types_of_ids(ids: Sequence[object], field: str) -> None:
    if not _INTS.issuperset(map(type, ids)):
        index = next(index for index, number in enumerate(ids) if type(number) is not int)
        raise wrong_kind(f"{field}.{index}", ids[index], "a token id")


def _check_range_of_ids(ids: Sequence[int], field: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_COUNT:
        index = next(index for index, number in enumerate(ids) if not 0 <= number <= MAX_COUNT)
        raise InvalidRequest(
            f"{field}.{index}: {shown(ids[index])} is not a token id, from 0 to {MAX_COUNT}",
            field=f"{field}.{index}",
        )


def written(value: object, field: str) -> str:
    """Return ``str(value)``; an int of thousands of digits has none."""
    try:
        return str(value)
    except ValueError as error:
        raise InvalidRequest(f"{field}: it cannot be written as text, {error}", field=field) from (
            error
        )
