"""Bounds on what uvicorn leaves to others: long and slow headers, readers that do not read."""

import asyncio
import fcntl
import json
import struct
import termios
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.gateway.request_ids import HEADER, accepted_id

#: Of the request line and the headers together; nginx takes 32 KiB, h11 64.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
#: So often within its time it is looked whether a reader has taken anything.
_LOOKS = 4
#: How long, while the process stops, a client may take to answer the end of TLS; those that keep
#: connections for later do not.
_FAREWELL_SECONDS = 1.0


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
        self._end_timer: asyncio.TimerHandle | None = None
        self._num_still_looks = 0
        self._is_refused = self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self._stop_reader_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
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
        self._num_still_looks = 0
        self._await_reader()

    def resume_writing(self) -> None:
        """Go on: the client has taken most of it."""
        super().resume_writing()
        self._stop_reader_timer()

    def shutdown(self) -> None:
        """Close the connection once nothing is answered on it."""
        self._is_stopping = True
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later(_FAREWELL_SECONDS)

    def on_response_complete(self) -> None:
        """Begin the next request, or let the connection end."""
        super().on_response_complete()
        if self._is_stopping:
            self._abort_later(_FAREWELL_SECONDS)

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

    def _abort_later(self, seconds: float) -> None:
        if self.scheme == "https":
            self._end_timer = self.loop.call_later(seconds, self._abort_if_taken, seconds)

    def _abort_if_taken(self, seconds: float) -> None:
        _, num_unacknowledged = self._num_untaken()
        if num_unacknowledged:
            self._abort_later(seconds)
        else:
            self.transport.abort()

    def _await_reader(self) -> None:
        # Nothing is sent meanwhile, so that whatever changes has been taken.
        self._reader_timer = self.loop.call_later(
            self.READER_SECONDS / _LOOKS, self._look_at_reader, self._num_untaken()
        )

    def _look_at_reader(self, num_before: tuple[int, int]) -> None:
        has_taken = self._num_untaken() != num_before
        self._num_still_looks = 0 if has_taken else self._num_still_looks + 1
        if self._num_still_looks < _LOOKS:
            self._await_reader()
        else:
            self.transport.abort()

    def _num_untaken(self) -> tuple[int, int]:
        """Bytes that are not sent, and those the client's side has not acknowledged."""
        connection = self.transport.get_extra_info("socket")
        unsent = self.transport.get_write_buffer_size()
        return unsent, 0 if connection is None else _num_unacknowledged(connection.fileno())

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
        self.transport.write(_refusal(status, self._request_id()))
        self.transport.close()

    def _request_id(self) -> str:
        scope: Any = self.scope or {}
        given = dict(scope.get("headers", ())).get(HEADER.encode(), b"")
        made = scope.get("state", {}).get("request_id")
        return str(made or accepted_id(given.decode("latin-1")))


def _num_unacknowledged(descriptor: int) -> int:
    try:
        told = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except OSError:
        # Not of every kind of connection is it known; then what we have not sent must do.
        return 0
    return int(struct.unpack("i", told)[0])


_REFUSALS = {
    HTTPStatus.BAD_REQUEST: ("the request is not valid HTTP/1.1", "invalid_http"),
    HTTPStatus.REQUEST_TIMEOUT: ("the headers did not arrive in time", "timeout"),
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: (
        f"the headers are more than {MAX_HEADERS} or than {MAX_HEAD_BYTES} bytes",
        "request_too_large",
    ),
}


def _refusal(status: HTTPStatus, request_id: str) -> bytes:
    message, code = _REFUSALS[status]
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{HEADER}: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def bounded(head_seconds: float, reader_seconds: float) -> type[BoundedHttp]:
    """Return the protocol with bounds of its own: uvicorn passes none on."""
    bounds = {"HEAD_SECONDS": head_seconds, "READER_SECONDS": reader_seconds}
    return type("BoundedHttp", (BoundedHttp,), bounds)
