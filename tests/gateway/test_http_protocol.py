"""What a connection may cost: headers and readers that are slow."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tidemill.gateway.http_protocol import bounded

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
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")


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
