"""Bodies in JSON, read so that nobody waits for a long one."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from tidemill.service.offload import beside_loop

#: From this length on a body can have so many values that one by one they took too long.
LONG_BYTES = 64 * 1024

#: The fewest digits of an integer of more than 64 bits, which orjson takes for floating point.
_LONG_NUMBER = b"0" * len(str(2**63))
_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class JsonRoute(APIRoute):
    """A route whose handler gets a ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what handles a request."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonRequest(Request):
    """A request whose body is read by the quickest reader that is right."""

    async def json(self) -> Any:
        """Return the body; raises ``json.JSONDecodeError``."""
        if not hasattr(self, "_json"):
            self._json = await read_json(await self.body())
        return self._json


async def read_json(body: bytes) -> Any:
    """Return what a body in JSON says; raises ``json.JSONDecodeError``.

    A long one must be JSON to the letter: no NaN, no half of a surrogate pair, and UTF-8.
    """
    if len(body) < LONG_BYTES:
        return json.loads(body)
    if _LONG_NUMBER in body.translate(_TO_ZEROS):
        return await beside_loop(partial(_read_in_turns, body))
    # Others have their turn, before and after.
    await asyncio.sleep(0)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # As its reason, because the place is all that is told of where it is.
        raise json.JSONDecodeError(str(error), "", error.pos) from None
    await asyncio.sleep(0)
    return value


def _read_in_turns(body: bytes) -> Any:
    # The reader in C lets no other thread run, but while a function of Python's reads a number.
    return json.loads(body, parse_int=_integer, parse_float=_number)


def _integer(digits: str) -> int:
    return int(digits)


def _number(digits: str) -> float:
    return float(digits)
