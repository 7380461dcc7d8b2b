"""Every request has an id: its caller's or a new one, told in the answer and in the log."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.protocol.ids import new_ulid

HEADER = "x-request-id"
_ACCEPTED = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """ASGI middleware: the header ``X-Request-Id`` of requests and answers.

    The id is in the request's state as ``request_id``; one with odd characters is replaced.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = accepted_id(Headers(scope=scope).get(HEADER, ""))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def accepted_id(given: str) -> str:
    """Return the id that a request has given, or a new one if it gave none that can be used."""
    return given if _ACCEPTED.fullmatch(given) else f"req_{new_ulid()}"
