"""What a connection may cost: headers and readers that are slow."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tidemill.gateway.http_protocol import BoundedHttp, bounded

WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def served(app: Any, *, head_seconds: float = 9.0, reader_seconds: float = 9.0) -> Any:
    """Yields how to connect to an application behind the protocol."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", loop="none")
    config.load()
    protocol, state = bounded(head_seconds, reader_seconds), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: protocol(config, state, {}), "127.0.0.1", 0, start_serving=True
    )
    port = server.sockets[0].getsockname()[1]

    @asynccontextmanager
    async def connect() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    try:
        yield connect
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def test_who_does_not_read_counts_as_gone() -> None:
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}

        async def write() -> None:
            while True:
                await send(more)

        writing = asyncio.create_task(write())
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        gone.set()

    async with served(app, reader_seconds=0.2) as connect, connect() as (_, writer):
        writer.write(WHOLE)
        async with asyncio.timeout(30):
            await gone.wait()


class Pipe(asyncio.Transport):
    """A connection whose client takes as many bytes at each look as it is told."""

    def __init__(self, *taken: int, is_tls: bool = False) -> None:
        super().__init__()
        self._taken = list(taken)
        self._num_left = 1 << 20
        self._is_tls = is_tls
        self.is_closed = self.is_cut = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._is_tls or default if name == "sslcontext" else default

    def get_write_buffer_size(self) -> int:
        return self._num_left

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_cut = True

    def take(self) -> bool:
        """Let the client read; returns whether it is still there."""
        self._num_left -= self._taken.pop(0) if self._taken else 0
        return not self.is_cut


def protocol_of(pipe: Pipe) -> BoundedHttp:
    config = uvicorn.Config(None, log_config=None, lifespan="off", ws="none", loop="none")  # type: ignore[arg-type]
    protocol = bounded(9.0, 9.0)(config, ServerState(), {})
    protocol.connection_made(pipe)
    return protocol


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Callable[[], None]]]:
    """What is to be called later, instead of that it is called."""
    later: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()

    def call_later(seconds: float, *call: Any) -> asyncio.TimerHandle:
        later.append(partial(*call))
        return asyncio.TimerHandle(0.0, call[0], call[1:], loop)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", call_later)
        yield later


@pytest.mark.parametrize(("taken", "num_looks"), [([], 4), ([1] * 20, 24)])
async def test_who_reads_slowly_but_steadily_is_not_cut_off(
    timers: list[Callable[[], None]], taken: list[int], num_looks: int
) -> None:
    pipe = Pipe(*taken)
    protocol_of(pipe).pause_writing()
    num = 0
    while pipe.take():
        timers.pop()()
        num += 1
    assert num == num_looks


@pytest.mark.parametrize("is_tls", [False, True])
async def test_idle_connections_over_tls_are_cut_when_the_process_stops(
    timers: list[Callable[[], None]], is_tls: bool
) -> None:
    pipe = Pipe(is_tls=is_tls)
    protocol = protocol_of(pipe)
    timers.clear()
    protocol.shutdown()
    assert pipe.is_closed and not pipe.is_cut
    for call in timers:
        call()
    assert pipe.is_cut == is_tls


async def test_an_answer_is_not_cut_because_the_next_request_is_slow() -> None:
    late = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await late.wait()
        length = (b"content-length", b"2")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(app, head_seconds=0.2) as connect, connect() as (reader, writer):
        writer.write(WHOLE + b"GET /next HTTP/1.1\r\nx-slow: ")
        loop = asyncio.get_running_loop()
        # Later than the headers may take.
        loop.call_later(0.5, late.set)
        async with asyncio.timeout(30):
            told = await reader.read(-1)
    first, _, rest = told.partition(b"\r\n\r\nok")
    assert first.startswith(b"HTTP/1.1 200") and rest.startswith(b"HTTP/1.1 408")


_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        _HEAD + b"content-length: -5\r\n\r\n",
        _HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        _HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    ],
    ids=["line", "negative", "two lengths", "chunk"],
)
async def test_what_is_no_http_is_refused_in_openais_form(request_bytes: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(app) as connect, connect() as (reader, writer):
        writer.write(request_bytes)
        async with asyncio.timeout(30):
            answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    assert b"\r\nx-request-id: req_" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")


async def test_a_refusal_bears_the_id_that_its_request_gave() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing is asked")

    async with served(app) as connect, connect() as (reader, writer):
        writer.write(_HEAD + b"X-Request-Id: mine\r\n" + b"a: b\r\n" * 100 + b"\r\n")
        async with asyncio.timeout(30):
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ") and b"\r\nx-request-id: mine\r\n" in answer


async def test_what_is_no_http_behind_the_beginning_of_an_answer_ends_it_and_adds_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(app) as connect, connect() as (reader, writer):
        writer.write(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        async with asyncio.timeout(30):
            assert await reader.readuntil(b"begun")
            writer.write(b"zz\r\n")
            assert b"HTTP/1.1" not in await reader.read()
