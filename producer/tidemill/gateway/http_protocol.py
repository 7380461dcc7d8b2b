"""Bounds on what uvicorn leaves to others: long and slow headers, readers that do not read."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Of the request line and the headers together; nginx takes 32 KiB, h11 64.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which bounds the headers of a request in no way, with bounds.

    A connection has ``HEAD_SECONDS`` from when it is made, or from a request's first byte, to the
    end of the headers; then it is closed.  Between requests the keep-alive timeout holds.  A client
    that takes nothing of its answer for ``READER_SECONDS`` is cut off, and counts as gone.
    """

    HEAD_SECONDS = 30.0
    READER_SECONDS = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_silent = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless the connection is being closed."""
        self._is_silent = False
        if not self._is_refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as a request or in its midst."""
        if self.cycle is not None and self.cycle.response_started:
            # An answer is on its way, and a second one would be taken for a part of it.
            self._is_refused = True
            self.transport.close()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST)

    def pause_writing(self) -> None:
        """Wait for the client, who has not taken what was sent."""
        super().pause_writing()
        self._stop_reader_timer()
        self._reader_timer = self.loop.call_later(self.READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has taken most of it."""
        super().resume_writing()
        self._stop_reader_timer()

    def on_message_begin(self) -> None:
        """Begin to count the head of a request."""
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        if self._has_room(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, unless there are too many."""
        if self._has_room(len(name) + len(value) + 4) and len(self.headers) < MAX_HEADERS:
            super().on_header(name, value)
        else:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._stop_waiting()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if not self._is_refused:
            super().on_message_complete()

    def _has_room(self, num_bytes: int) -> bool:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return not self._is_refused

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _give_up(self) -> None:
        # While an answer to an earlier request of the connection is written, it must not be cut.
        if self._is_silent:
            # Opened in advance, as browsers do: an answer would be taken for that of a request
            # which is sent at this moment.
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self._await_head()

    def _refuse(self, status: HTTPStatus) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        self.transport.write(_refusal(status))
        self.transport.close()


_REFUSALS = {
    HTTPStatus.BAD_REQUEST: ("the request is not valid HTTP/1.1", "invalid_http"),
    HTTPStatus.REQUEST_TIMEOUT: ("the headers did not arrive in time", "timeout"),
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: (
        f"the headers are more than {MAX_HEADERS} or than {MAX_HEAD_BYTES} bytes",
        "request_too_large",
    ),
}


def _refusal(status: HTTPStatus) -> bytes:
    message, code = _REFUSALS[status]
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def bounded(head_seconds: float, reader_seconds: float) -> type[BoundedHttp]:
    """Return the protocol with bounds of its own: uvicorn passes none on."""
    bounds = {"HEAD_SECONDS": head_seconds, "READER_SECONDS": reader_seconds}
    return type("BoundedHttp", (BoundedHttp,), bounds)
