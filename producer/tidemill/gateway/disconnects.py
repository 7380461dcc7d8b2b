"""Noticing that a client has gone while its answer is being made."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run what is inside until the client goes; then it is cut short, and ``ClientGone`` raised.

    The request's body must have been read.
    """
    try:
        async with asyncio.timeout(None) as life:
            watch = asyncio.create_task(_watch(receive, life))
            try:
                yield
            finally:
                watch.cancel()
    except TimeoutError as error:
        if life.expired():
            raise ClientGone from error
        raise


async def _watch(receive: Receive, life: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    life.reschedule(asyncio.get_running_loop().time())
