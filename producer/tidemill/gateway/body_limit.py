"""Bounds on the bodies of requests: how long they are, and how long they may take to arrive."""

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.gateway.errors import error_response
from tidemill.protocol.errors import RequestTooLarge

#: What a body must bring on the whole, beyond the longest silence: one byte now and then would
#: keep a connection busy for ever.
MIN_BYTES_PER_SECOND = 1024

#: Of a body in JSON: reading it holds up everybody, for as long as there are values in it, of which
#: lists and objects cost the most, and then names.  All are counted by their signs, those within
#: texts too.
MAX_OPENED = 1 << 18
MAX_COLONS = 1 << 19
MAX_COMMAS = 1 << 20


class BodyLimit:
    """ASGI middleware: answers 413 to a body that is too long, 408 to one that does not come.

    What is no form may have ``MAX_OPENED`` lists and objects, ``MAX_COLONS`` and ``MAX_COMMAS``.
    ``bounds`` names the paths, by their beginnings, that take more or less than ``num_bytes``.
    """

    def __init__(
        self, app: ASGIApp, num_bytes: int, bounds: Mapping[str, int], silence_seconds: float
    ) -> None:
        self._app = app
        self._num_bytes = num_bytes
        self._bounds = bounds
        self._silence_seconds = silence_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit(scope["path"].removeprefix(scope.get("root_path", "")))
        if _announced(scope) > limit:
            await error_response(_too_large(limit))(scope, receive, send)
            return
        body = _Body(receive, limit, self._silence_seconds, is_form=_is_form(scope))
        await self._app(scope, body.receive, send)

    def _limit(self, path: str) -> int:
        limits = [size for start, size in self._bounds.items() if path.startswith(start)]
        return max(limits, default=self._num_bytes)


class _Body:
    """Counts what arrives; to be read by one reader."""

    def __init__(
        self, receive: Receive, limit: int, silence_seconds: float, *, is_form: bool
    ) -> None:
        self._receive = receive
        self._limit = limit
        self._silence_seconds = silence_seconds
        self._is_form = is_form
        self._num_bytes = self._num_opened = self._num_colons = self._num_commas = 0
        self._waited_seconds = 0.0
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            message = await self._next()
        except TimeoutError as error:
            raise HTTPException(408, "the body did not arrive in time") from error
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._limit:
            # As an HTTPException: whatever else is raised here counts as a malformed body.
            raise HTTPException(413, _too_large(self._limit).one_line())
        if not self._is_form:
            self._count(message.get("body", b""))
        return message

    def _count(self, data: bytes) -> None:
        self._num_opened += data.count(b"[") + data.count(b"{")
        self._num_colons += data.count(b":")
        self._num_commas += data.count(b",")
        is_opened_often = self._num_opened > MAX_OPENED
        if is_opened_often or self._num_colons > MAX_COLONS or self._num_commas > MAX_COMMAS:
            raise HTTPException(
                413,
                f"the body has more than {MAX_OPENED} lists and objects, {MAX_COLONS} colons or"
                f" {MAX_COMMAS} commas: send less in one request",
            )

    async def _next(self) -> Message:
        # Only what is spent in waiting counts: that the reader is slow is not the client's fault.
        patience = self._silence_seconds + self._num_bytes / MIN_BYTES_PER_SECOND
        left = min(self._silence_seconds, patience - self._waited_seconds)
        clock = asyncio.get_running_loop().time
        began_at = clock()
        async with asyncio.timeout(max(0.0, left)):
            message = await self._receive()
        self._waited_seconds += clock() - began_at
        return message


def _announced(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 20 else 0


def _is_form(scope: Scope) -> bool:
    return Headers(scope=scope).get("content-type", "").lower().startswith("multipart/form-data")


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body is longer than {limit} bytes",
        field="",
        fix="Send less, or start the gateway with a larger limit.",
    )
