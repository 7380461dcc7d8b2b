"""JSON values at the start of a text that may not be all there yet."""

import json
import re
from dataclasses import dataclass
from typing import Any

#: Beginnings of what cannot be judged before it goes on: literals, numbers, escapes.
_CUT_OFF = re.compile(r"(t(r(u)?)?|f(a(l(s)?)?)?|n(u(l)?)?|-|[.eE][0-9+\-]*|\\u[0-9a-fA-F]{0,3})$")


@dataclass(frozen=True, slots=True)
class JsonStart:
    """A value and where it ends; ``end`` is -1 if it is cut off, -2 if it is no JSON."""

    value: Any = None
    end: int = -1

    @property
    def is_cut_off(self) -> bool:
        """Whether more text may make it a value."""
        return self.end == -1

    @property
    def is_malformed(self) -> bool:
        """Whether nothing that follows can make it a value."""
        return self.end == -2


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Line breaks within strings are no JSON, but models write them.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def read_json(text: str, start: int = 0) -> JsonStart:
    """Read the JSON value that begins at or, after white space, behind ``start``."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        return JsonStart()
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return JsonStart(end=-1 if _is_cut_off(text, error) else -2)
    except (ValueError, RecursionError):
        return JsonStart(end=-2)
    return JsonStart(value, end)


def _is_cut_off(text: str, error: json.JSONDecodeError) -> bool:
    if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
        return True
    if error.msg.startswith("Invalid \\uXXXX"):
        return len(text) - error.pos < 6
    return _CUT_OFF.match(text, error.pos) is not None
