"""Noticing that a client has gone while its answer is being made."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection."""


@asynccontextmanager
async def while_connected(
    receive: Receive,
    *,
    tick_seconds: float | None = None,
    tick: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """Run what is inside until the client goes; then it is cut short, and ``ClientGone`` raised.

    The request's body must have been read.  ``tick`` is called every ``tick_seconds`` meanwhile.
    """
    try:
        async with asyncio.timeout(None) as life:
            watch = asyncio.create_task(_watch(receive, life, tick_seconds, tick))
            try:
                yield
            finally:
                watch.cancel()
    except TimeoutError as error:
        if life.expired():
            raise ClientGone from error
        raise


async def _watch(
    receive: Receive,
    life: asyncio.Timeout,
    tick_seconds: float | None,
    tick: Callable[[], Awaitable[None]] | None,
) -> None:
    while True:
        try:
            async with asyncio.timeout(tick_seconds):
                message = await receive()
        except TimeoutError:
            if tick is not None:
                await tick()
            continue
        if message["type"] == "http.disconnect":
            break
    life.reschedule(asyncio.get_running_loop().time())
