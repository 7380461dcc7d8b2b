"""What the text of a tool call may turn out to be."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tidemill.openai.deltas import ToolCall

#: The offered tools: name -> JSON schema of the arguments.
Tools = Mapping[str, Mapping[str, Any]]


class Status(Enum):
    """How far a text is from being calls."""

    DONE = auto()
    UNFINISHED = auto()
    MALFORMED = auto()


@dataclass(frozen=True, slots=True)
class Reading:
    """``length`` characters of a text are these calls or, if malformed, no call at all."""

    status: Status
    calls: tuple[ToolCall, ...] = ()
    length: int = 0


UNFINISHED = Reading(Status.UNFINISHED)

#: How many markers within one call's arguments are seen through; each costs a reading per piece.
_MOST_MARKERS = 16

#: Reads calls from the start of a text, which goes on unless the flag says that it is all.
Reader = Callable[[str, Tools, bool], Reading]
#: Reads the calls that make up a whole text; None if it is malformed, () if it is cut off.
Decoder = Callable[[str, Tools], tuple[ToolCall, ...] | None]


def malformed(length: int) -> Reading:
    """Return that the first ``length`` characters are no calls; what follows is read as text.

    Only what is certain to be seen at once may count: how much has arrived must not matter.
    """
    return Reading(Status.MALFORMED, length=length)


def done(calls: tuple[ToolCall, ...], length: int) -> Reading:
    """Return calls that take ``length`` characters."""
    return Reading(Status.DONE, calls, length)


def enclosed(close: str, decode: Decoder, *, needs_close: bool = False) -> Reader:
    """Return a reader of what ends at ``close``.

    A marker within an argument is not the end: the text before it is cut off in a string then.
    Calls that are whole may lack it at the end of the output, unless it ``needs_close``.
    """

    def read(text: str, tools: Tools, is_all: bool) -> Reading:
        first = end = text.find(close)
        for _ in range(_MOST_MARKERS):
            if end < 0:
                break
            calls = decode(text[:end], tools)
            if calls or not text[:end].strip():
                return done(calls or (), end + len(close))
            if calls is None:
                return malformed(end + len(close))
            end = text.find(close, end + 1)
        if end < 0 and not is_all:
            return UNFINISHED
        if first >= 0:
            return malformed(first + len(close))
        return UNFINISHED if needs_close else _without_close(decode(text, tools), text)

    return read


def _without_close(calls: tuple[ToolCall, ...] | None, text: str) -> Reading:
    if calls:
        return done(calls, len(text))
    return malformed(len(text)) if calls is None else UNFINISHED


def make_call(name: object, arguments: object) -> ToolCall | None:
    """Return the call, or None if these are no name and no arguments."""
    if isinstance(arguments, str):
        # Some models quote the object once more.
        arguments = _loads(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _loads(text: str) -> object:
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
