"""Reads that are asked for at one moment go out in one round trip."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import redis
import redis.asyncio

from tidemill._reads import Read

#: Reads of one round trip; to pack and parse more would hold up the event loop.
_PER_TRIP = 64


class _Asked(NamedTuple):
    """A read and who waits for its replies."""

    read: Read[Any]
    replies: asyncio.Future[list[Any]]


class SharedReads:
    """Collects the reads of one turn of the event loop.

    Thousands of streams that wait look at their logs again and again; alone, each of them would
    need a connection, and several times the processor.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._asked: list[_Asked] = []
        self._trips: set[asyncio.Task[None]] = set()

    async def send(self, read: Read[Any]) -> list[Any]:
        """Return the replies to a read's commands; raises what redis-py does."""
        loop = asyncio.get_running_loop()
        asked = _Asked(read, loop.create_future())
        self._asked.append(asked)
        if len(self._asked) == 1:
            loop.call_soon(self._set_out)
        return await asked.replies

    async def close(self) -> None:
        """End what is under way, as if the connection had been lost."""
        trips = list(self._trips)
        for trip in trips:
            trip.cancel()
        await asyncio.gather(*trips, return_exceptions=True)

    def _set_out(self) -> None:
        asked = [each for each in self._asked if not each.replies.done()]
        self._asked = []
        for start in range(0, len(asked), _PER_TRIP):
            trip = asyncio.create_task(self._travel(asked[start : start + _PER_TRIP]))
            self._trips.add(trip)
            trip.add_done_callback(self._trips.discard)

    async def _travel(self, asked: Sequence[_Asked]) -> None:
        try:
            replies = await self._execute(asked)
        except asyncio.CancelledError:
            # Those who asked were not cancelled, and must not look as if they had been.
            for each in asked:
                _tell(each, redis.ConnectionError("the client was closed"))
            raise
        except Exception as error:
            for each in asked:
                _tell(each, error)
        else:
            for each, told in zip(asked, _divided(asked, replies), strict=True):
                _tell(each, told)

    async def _execute(self, asked: Sequence[_Asked]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for each in asked:
                for command in each.read.commands:
                    pipeline.execute_command(*command)
            return list(await pipeline.execute(raise_on_error=False))


def _divided(asked: Sequence[_Asked], replies: list[Any]) -> Iterator[list[Any] | Exception]:
    start = 0
    for each in asked:
        own = replies[start : start + len(each.read.commands)]
        start += len(own)
        yield next((reply for reply in own if isinstance(reply, Exception)), own)


def _tell(asked: _Asked, told: list[Any] | Exception) -> None:
    if asked.replies.done():
        return  # whoever asked has been cancelled
    if isinstance(told, Exception):
        asked.replies.set_exception(told)
    else:
        asked.replies.set_result(told)
