"""From pydantic's complaints about values to words for whoever gave the values; pure."""

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

#: Names of fields; pydantic puts names of its own types between them.
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TYPES = frozenset({"str", "int", "float", "bool", "bytes", "none", "tuple", "list", "dict"})
_MAX_SHOWN_CHARS = 40
_OF_FIELD = "of_field"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

#: What lengths are counted in.
_UNITS: tuple[tuple[type, str], ...] = (
    (str, "character"),
    (bytes, "byte"),
    (object, "item"),
)


class Complaint(NamedTuple):
    """The field, with its parents and dots between them, "" for the whole; and what is wrong."""

    field: str
    reason: str


def field_error(field: str, reason: str) -> ValueError:
    """Return what a validator of a whole model raises to name the one field that is wrong."""
    context = {"field": field, "reason": reason}
    return PydanticCustomError(_OF_FIELD, "{field}: {reason}", context)


def complaint_of(problems: Sequence[Mapping[str, Any]], *, show: bool = True) -> Complaint:
    """Return the first of these ``errors()``; of a union's, that of the member that fits best.

    ``show`` adds the value, if it is short.
    """
    first = problems[0]
    path = _path(first)
    for other in problems[1:]:
        # Whatever is wrong further in belongs to the member that was meant.
        if len(_path(other)) > len(path) and _path(other)[: len(path)] == path:
            first, path = other, _path(other)
    return Complaint(".".join(path), _reason(first, show=show and bool(path)))


def _path(problem: Mapping[str, Any]) -> tuple[str, ...]:
    named = (problem["ctx"]["field"],) if problem["type"] == _OF_FIELD else ()
    return (*(str(part) for part in problem["loc"] if _is_field(part)), *named)


def _is_field(part: str | int) -> bool:
    return isinstance(part, int) or (bool(_FIELD.fullmatch(part)) and part not in _TYPES)


def _reason(problem: Mapping[str, Any], *, show: bool) -> str:
    length = _length_reason(problem)
    if length:
        return length
    if problem["type"] == _OF_FIELD:
        return str(problem["ctx"]["reason"])
    reason = str(problem["msg"]).removeprefix("Value error, ").replace("valid tuple", "valid list")
    if not show or problem["type"] == "missing":
        return reason
    shown = _shown(problem.get("input"))
    return f"{reason}, got {shown}" if len(shown) <= _MAX_SHOWN_CHARS else reason


def _length_reason(problem: Mapping[str, Any]) -> str:
    """Return what is wrong with the length of a value, "" if it is not about that."""
    kind, value, limits = problem["type"], problem.get("input"), problem.get("ctx", {})
    if not isinstance(value, Sized):
        return ""
    if kind.endswith("too_short"):
        least = f"it has {_count(value)}, at least {limits['min_length']} are needed"
        return least if len(value) else "it is empty"
    if kind.endswith("too_long"):
        return f"it has {_count(value)}, the limit is {limits['max_length']}"
    return ""


def _count(value: Sized) -> str:
    unit = next(unit for kind, unit in _UNITS if isinstance(value, kind))
    return f"{len(value)} {unit}{'' if len(value) == 1 else 's'}"


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except RecursionError:
        return "a value of too many levels, one in the other"
    except ValueError:
        return "a number of thousands of digits"
    return f"a {type(value).__name__}" if _ADDRESS.search(shown) else shown
