"""The asynchronous twin of ``tidemill._link``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tidemill._cancellation import heeding_cancellation
from tidemill._patience import LibraryExists, LibraryMissing, Patience, broker_errors
from tidemill._reads import Read
from tidemill.protocol.errors import BrokerUnavailable, TidemillError
from tidemill.protocol.functions import LUA_SOURCE, Call, run_async, run_many_async
from tidemill.service.redis import connect_async

R = TypeVar("R")


class AsyncLink:
    """Sends calls and reads, again while the broker is away; all of them are idempotent.

    Raises ``BrokerUnavailable`` after ``timeout`` seconds.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._timeout = timeout
        self.client = connect_async(url, timeout_seconds=timeout, retries=0)

    async def call(self, call: Call[R]) -> R:
        """Run one function."""
        return await self.retry(lambda: run_async(self.client, call))

    async def call_many(self, calls: Sequence[Call[R]]) -> list[R | TidemillError]:
        """Run functions in one round trip; an error takes the place of its call's result."""
        return await self.retry(lambda: run_many_async(self.client, calls))

    async def read(self, read: Read[R]) -> R:
        """Read once."""
        return read.parse(await self.retry(lambda: self._send(read)))

    async def close(self) -> None:
        """Close every connection."""
        await self.client.aclose()

    async def _send(self, read: Read[Any]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for command in read.commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute())

    async def retry(self, action: Callable[[], Awaitable[R]]) -> R:
        """Do ``action``, which may be repeated, until the broker answers."""
        with heeding_cancellation():
            return await self._retry(action)

    async def _retry(self, action: Callable[[], Awaitable[R]]) -> R:
        patience, may_load = Patience(self._timeout), True
        while True:
            try:
                with broker_errors():
                    return await action()
            except LibraryMissing:
                if not may_load:
                    raise
                may_load = False
                await self._load_library()
            except BrokerUnavailable as error:
                await asyncio.sleep(patience.next_wait(error))

    async def _load_library(self) -> None:
        # Never in place of another one: this process may be the older of two.
        with suppress(LibraryExists), broker_errors():
            await self.client.function_load(LUA_SOURCE)
