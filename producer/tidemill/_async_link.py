"""The asynchronous twin of ``tidemill._link``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tidemill._async_listener import AsyncListener
from tidemill._async_reads import SharedReads
from tidemill._cancellation import heeding_cancellation
from tidemill._endpoint import Endpoint
from tidemill._patience import (
    TRY_SHARE,
    LibraryExists,
    LibraryMissing,
    Patience,
    broker_errors,
)
from tidemill._plan import Plan
from tidemill._reads import Read
from tidemill.protocol.errors import BrokerUnavailable, TidemillError
from tidemill.protocol.functions import LUA_SOURCE, Call, run_async, run_many_async
from tidemill.protocol.ids import shard_of
from tidemill.service.broker_url import is_cluster
from tidemill.service.redis import connect_async

R = TypeVar("R")

#: Calls of one link under way at once, each on a connection of its own; redis-py refuses the 101st
#: connection of a pool as if the broker were away.
MAX_CALLS = 64


class AsyncLink:
    """Sends calls and reads, again while the broker is away; all of them are idempotent.

    Raises ``BrokerUnavailable`` after ``timeout`` seconds.  ``listener`` hears the channels of the
    shard.
    """

    def __init__(self, url: str, shard: str, timeout: float) -> None:
        #: How long one call may wait for the broker, in seconds.
        self.timeout = timeout
        self.client = connect_async(
            url, shard=shard, timeout_seconds=timeout * TRY_SHARE, retries=0
        )
        self.listener = AsyncListener(self.client)
        self._reads = SharedReads(self.client)
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def call(self, call: Call[R]) -> R:
        """Run one function."""
        return await self.retry(lambda: run_async(self.client, call))

    async def call_many(self, calls: Sequence[Call[R]]) -> list[R | TidemillError]:
        """Run functions in one round trip; an error takes the place of its call's result."""
        return await self.retry(lambda: run_many_async(self.client, calls))

    async def read(self, read: Read[R]) -> R:
        """Read once."""
        return read.parse(await self.retry(lambda: self._reads.send(read)))

    async def carry_out(self, plan: Plan[R]) -> R:
        """Do what ``plan`` asks for, step by step; returns what it came to."""
        reply: Any = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as stop:
                result: R = stop.value
                return result
            if isinstance(step, Read):
                reply = await self.read(step)
            else:
                reply = await self.call_many(step)

    async def close(self) -> None:
        """Close every connection."""
        await self.listener.close()
        await self._reads.close()
        await self.client.aclose()

    async def retry(self, action: Callable[[], Awaitable[R]]) -> R:
        """Do ``action``, which may be repeated, until the broker answers."""
        with heeding_cancellation():
            return await self._retry(action)

    async def _retry(self, action: Callable[[], Awaitable[R]]) -> R:
        patience, may_load = Patience(self.timeout), True
        while True:
            try:
                async with self._slots:
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


class AsyncLinks:
    """The asynchronous twin of ``Links``."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._others: dict[str, AsyncLink] = {}
        #: The link to the shard of the tenant.
        self.home = AsyncLink(endpoint.url, endpoint.keys.shard, timeout)

    def of(self, job_id: str) -> AsyncLink:
        """Return the link to the shard that ``job_id`` names; raises ``InvalidRequest``."""
        shard, endpoint = shard_of(job_id), self._endpoint
        if shard == endpoint.keys.shard or not is_cluster(endpoint.url):
            return self.home
        if shard not in self._others:
            self._others[shard] = AsyncLink(endpoint.url, shard, self._timeout)
        return self._others[shard]

    async def close(self) -> None:
        """Close every connection."""
        for link in (self.home, *self._others.values()):
            await link.close()
