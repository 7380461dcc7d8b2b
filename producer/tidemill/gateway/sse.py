"""Server-sent events, written with as few writes as there are moments with news."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tidemill.gateway.disconnects import ClientGone, while_connected
from tidemill.gateway.errors import STOPPING, ApiError, api_error
from tidemill.gateway.failures import GOODBYE_SECONDS

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
#: A comment, which clients skip; keeps proxies from closing a stream whose job waits.
_KEEP_ALIVE = b": waiting\n\n"
KEEP_ALIVE_SECONDS = 15.0
#: What a timer may come too soon.
_CLOCK_SECONDS = 0.002

_HEADERS = {
    "cache-control": "no-cache",
    # Nginx would hold events back otherwise.
    "x-accel-buffering": "no",
}


def event(data: bytes) -> bytes:
    """Return an event with these data, which have no line breaks."""
    return b"data: %b\n\n" % data


class EventStream(Response):
    """Writes what ``body`` yields, whole events, and closes it when the client goes.

    An error of the body becomes an event, since the status has been told before.  ``owner`` is
    entered before anything is sent, and left at the end however it comes; ``last`` ends the stream.
    ``error_event`` makes the last event of a stream that is cut off, with nothing behind it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        *,
        owner: AbstractContextManager[object] | None = None,
        last: bytes = DONE,
        error_event: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = body
        self._owner = nullcontext() if owner is None else owner
        self._last = last
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        writer = _Writer(send)
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            with self._owner:
                async with while_connected(receive):
                    await writer.begin(start)
                    with writer.comments():
                        await self._write(writer)
        except ClientGone:
            _log.debug("a client left its stream")
            return
        except asyncio.CancelledError:
            await writer.say_goodbye(self._goodbye())
            raise
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    def _goodbye(self) -> bytes:
        if self._error_event is not None:
            return self._error_event(STOPPING)
        return event(STOPPING.encoded()) + self._last

    async def _write(self, writer: "_Writer") -> None:
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await writer.write(data)
            except Exception as error:
                told = api_error(error)
                if told.code == "internal_error":
                    _log.exception("a stream failed")
                await writer.write(event(told.encoded()))


class _Writer:
    """Sends events, and comments while there are none."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def begin(self, start: Message) -> None:
        await self._send(start)
        self._has_begun = True

    async def write(self, data: bytes) -> None:
        self._wrote_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def say_goodbye(self, last: bytes) -> None:
        """End the stream with these events, if it has begun and that can be done at once."""
        if not self._has_begun:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._send({"type": "http.response.body", "body": last, "more_body": False})

    @contextmanager
    def comments(self) -> Iterator[None]:
        """Send comments meanwhile, whenever there was nothing else for a while."""
        self._set_timer(self._loop.time() + KEEP_ALIVE_SECONDS)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()

    def _set_timer(self, due: float) -> None:
        self._timer = self._loop.call_at(due, self._keep_alive)

    def _keep_alive(self) -> None:
        now = self._loop.time()
        if now - self._wrote_at >= KEEP_ALIVE_SECONDS - _CLOCK_SECONDS:
            self._wrote_at = now
            # A task for each comment, and none in between: most streams never need one.
            if self._comment is None or self._comment.done():
                self._comment = asyncio.create_task(self._tell_comment())
        self._set_timer(self._wrote_at + KEEP_ALIVE_SECONDS)

    async def _tell_comment(self) -> None:
        await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
