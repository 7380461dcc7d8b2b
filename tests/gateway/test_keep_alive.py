"""When streams without news tell proxies that they live."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from tidemill.gateway.sse import KEEP_ALIVE_SECONDS, EventStream


async def test_comments_come_whenever_nothing_was_written_for_a_quarter_of_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now = asyncio.get_running_loop(), 100.0
    timers: list[tuple[float, Callable[[], None]]] = []
    written: list[tuple[float, bytes]] = []
    news, waits = asyncio.Queue[bytes](), asyncio.Event()

    def call_at(when: float, callback: Callable[[], None], *_: Any) -> asyncio.TimerHandle:
        timers.append((when, callback))
        return asyncio.TimerHandle(when, callback, (), loop)

    async def body() -> AsyncGenerator[bytes]:
        while data := await news.get():
            yield data

    async def receive() -> Message:
        waits.set()
        return await asyncio.Event().wait()  # type: ignore[return-value]  # never comes

    async def send(message: Message) -> None:
        if data := message.get("body"):
            written.append((now, data))

    async def pass_time(until: float) -> None:
        nonlocal now
        while timers and timers[-1][0] <= until:
            now, callback = timers.pop()
            callback()
            await asyncio.sleep(0)
        now = until

    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: now)
        patched.setattr(loop, "call_at", call_at)
        stream = asyncio.create_task(EventStream(body(), last=b"")({"type": "http"}, receive, send))
        await waits.wait()
        await pass_time(140.0)
        news.put_nowait(b"data: 1\n\n")
        while len(written) < 3:
            await asyncio.sleep(0)
        await pass_time(160.0)
    news.put_nowait(b"")
    await stream
    comment = b": waiting\n\n"
    assert KEEP_ALIVE_SECONDS == 15.0
    assert written == [
        *((115.0, comment), (130.0, comment)),
        *((140.0, b"data: 1\n\n"), (155.0, comment)),
    ]
