"""What JSON can say and neither the queue nor a store can hold: found, and told by its place."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
from fastapi import HTTPException, Request

from tidemill.gateway.checks import refuse
from tidemill.gateway.json_bodies import LONG_BYTES
from tidemill.protocol.errors import InvalidRequest
from tidemill.service.offload import beside_loop

#: Levels of a body, one in the other.  orjson writes 254, and what is kept of a body wraps it.
MAX_DEPTH = 200
_SPARE_DEPTH = 50
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1

#: A value's place: that of what it is in, and its name or index there; None for the body.
_Place = tuple[Any, str | int] | None


async def check_json(request: Request) -> None:
    """Refuse a body that is not declared to be JSON, or has a value that nothing can hold.

    For every route of the app; those without a JSON body are let through.
    """
    if getattr(request.scope["route"], "body_field", None) is None or not await request.body():
        return
    given = request.headers.get("content-type", "")
    if not _is_json(given):
        told = f"is {given[:80]!r}" if given else "is missing"
        raise HTTPException(415, f"the header Content-Type {told}: send application/json")
    body = await request.json()
    if _can_be_written(body):
        return
    if len(await request.body()) < LONG_BYTES:
        raise _first_wrong(body)
    raise await beside_loop(partial(_first_wrong, body))


def check_values(body: Any) -> None:
    """Raise ``InvalidRequest`` naming the first value that cannot be kept or passed on.

    These are integers of more than 64 bits, texts with half of a surrogate pair, and nesting of
    more than ``MAX_DEPTH`` levels.
    """
    if not _can_be_written(body):
        raise _first_wrong(body)


def _first_wrong(body: Any) -> InvalidRequest:
    for place, depth, value in _walk(body):
        if reason := _reason(value, depth):
            return _wrong(place, reason)
    # Within the spare levels: too deep for some of what is made of a body.
    return _wrong(None, f"it has more than {MAX_DEPTH} levels, one in the other")


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _can_be_written(body: Any) -> bool:
    for _ in range(_SPARE_DEPTH):
        body = [body]
    try:
        orjson.dumps(body)
    except TypeError:
        return False
    return True


def _walk(body: Any) -> Iterator[tuple[_Place, int, Any]]:
    """Yield each value with its place and depth, in the order of the body."""
    stack: list[tuple[_Place, int, Any]] = [(None, 1, body)]
    while stack:
        place, depth, value = stack.pop()
        yield place, depth, value
        if isinstance(value, dict):
            stack += [((place, name), depth + 1, value[name]) for name in reversed(value)]
        elif isinstance(value, list):
            last = len(value) - 1
            stack += [
                ((place, last - index), depth + 1, each)
                for index, each in enumerate(reversed(value))
            ]


def _reason(value: Any, depth: int) -> str:
    if isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} levels, one in the other"
        names = value if isinstance(value, dict) else ()
        return "a name in it has half of a surrogate pair" if any(map(_is_torn, names)) else ""
    if isinstance(value, str):
        return "it has half of a surrogate pair" if _is_torn(value) else ""
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        return "it is an integer of more than 64 bits"
    return ""


def _is_torn(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _wrong(place: _Place, reason: str) -> InvalidRequest:
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(str(name)[:64])
    # A place deep down says no more by its last names.
    return refuse(".".join(reversed(names[-_MAX_NAMES:])) or "body", reason)


_MAX_NAMES = 16
