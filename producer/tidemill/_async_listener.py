"""Pub/sub for many readers on one connection, which a task of its own keeps alive."""

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection

from tidemill._async_subscription import Subscription, Turns
from tidemill._cancellation import heeding_cancellation
from tidemill._listener import BROKEN, LOST, Notice

_REOPEN_WAIT_SECONDS = 0.1

#: After so long without a message the server is asked for one; as long again, and it is gone.
_QUIET_SECONDS = 10.0

#: Messages that are taken in one turn of the event loop; each takes some microseconds.
_PER_TURN = 32


class AsyncListener:
    """All channels of one client on one connection; a broken one is replaced.

    Readers come and go without I/O: they only say what they want.  The task alone uses the
    connection, so that no reader meets its errors.  A reader that is dropped is discarded.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._pool = client.connection_pool
        self._readers: dict[str, weakref.WeakSet[Subscription]] = {}
        self._turns = Turns()
        self._subscribed: set[str] = set()
        #: Unsubscriptions that the server has not confirmed.
        self._leaving: Counter[str] = Counter()
        #: Channels whose readers may have changed.
        self._changed: set[str] = set()
        self._reading: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None

    def listen(self, channel: str) -> Subscription:
        """Begin to pass the channel's messages to a new reader.

        Its first notice is the confirmation.
        """
        reader = Subscription(channel, self._turns)
        self._readers.setdefault(channel, weakref.WeakSet()).add(reader)
        loop = asyncio.get_running_loop()
        weakref.finalize(reader, self._note_drop, loop, channel).atexit = False
        if channel in self._subscribed:
            reader.put(Notice(channel))
        self._note_change(channel)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="tidemill-listener")
        return reader

    def discard(self, reader: Subscription) -> None:
        """Stop passing messages to a reader."""
        reader.end()
        self._readers.get(reader.channel, weakref.WeakSet()).discard(reader)
        self._note_change(reader.channel)

    async def close(self) -> None:
        """End the task, which gives the connection back."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            # Again and again: redis-py may swallow a cancellation.
            task.cancel()
            await asyncio.wait({task}, timeout=_REOPEN_WAIT_SECONDS)

    def _note_change(self, channel: str) -> None:
        if bool(self._readers.get(channel)) == (channel in self._subscribed):
            return
        self._changed.add(channel)
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())
            self._reading = None

    def _note_drop(self, loop: asyncio.AbstractEventLoop, channel: str) -> None:
        # The garbage collector may run on any thread, and after the loop was closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._note_change, channel)

    async def _run(self) -> None:
        while True:
            with heeding_cancellation():
                await self._live()

    async def _live(self) -> None:
        try:
            async with self._connected() as connection:
                await self._serve(connection)
        except BROKEN:
            for readers in self._readers.values():
                for reader in readers:
                    reader.put(LOST)
            # The readers now ask the server themselves and so learn whether it is gone.
            await asyncio.sleep(_REOPEN_WAIT_SECONDS)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AbstractConnection]:
        # Not redis-py's PubSub, which reconnects in the middle of a read: cut short there, it
        # would be connected and not subscribed.
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        self._changed.update(self._readers)
        try:
            yield connection
        finally:
            self._subscribed.clear()
            self._leaving.clear()
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _serve(self, connection: AbstractConnection) -> None:
        clock = asyncio.get_running_loop().time
        due, is_asked = clock() + _QUIET_SECONDS, False
        while True:
            with heeding_cancellation():
                await self._subscribe(connection)
            if await self._pass_on(connection, due):
                due, is_asked = clock() + _QUIET_SECONDS, False
                continue
            # Readers that come and go are no sign of life.
            if clock() < due:
                continue
            if is_asked:
                raise redis.ConnectionError("the server does not answer a PING")
            due, is_asked = clock() + _QUIET_SECONDS, True
            with heeding_cancellation():
                await connection.send_command("PING", check_health=False)

    async def _subscribe(self, connection: AbstractConnection) -> None:
        while self._changed:
            changed, self._changed = self._changed, set()
            wanted = {channel for channel in changed if self._readers.get(channel)}
            for channel in changed - wanted:
                self._readers.pop(channel, None)
            new, old = wanted - self._subscribed, (changed - wanted) & self._subscribed
            self._subscribed = (self._subscribed | new) - old
            if new:
                await connection.send_command("SSUBSCRIBE", *new, check_health=False)
            if old:
                self._leaving.update(old)
                await connection.send_command("SUNSUBSCRIBE", *old, check_health=False)

    async def _pass_on(self, connection: AbstractConnection, due: float) -> bool:
        """Pass notices on until a reader comes or goes, or the loop's clock says ``due``.

        Returns whether anything was heard.
        """
        num_heard = 0
        try:
            # One timeout for many messages: it costs more than to read one.
            async with asyncio.timeout_at(due) as self._reading:
                while True:
                    # Reading can be cut short anywhere: what has arrived stays in the buffers.
                    response = await connection.read_response(
                        timeout=math.inf, disconnect_on_error=False
                    )
                    if response is None:
                        # So redis-py tells that the system's own patience has ended, ever again.
                        raise redis.ConnectionError("the connection has timed out")
                    self._take(response)
                    num_heard += 1
                    if num_heard % _PER_TURN == 0:
                        await asyncio.sleep(0)
        except TimeoutError:
            return num_heard > 0
        finally:
            self._reading = None

    def _take(self, response: Any) -> None:
        match response:
            case [b"sunsubscribe", bytes(channel), _]:
                self._check_farewell(channel.decode())
        notice = _notice_of(response)
        if notice is not None:
            for reader in self._readers.get(notice.channel, ()):
                reader.put(notice)

    def _check_farewell(self, channel: str) -> None:
        if not self._leaving[channel]:
            # The channel's slot has moved: the messages are now on another server.
            raise redis.ConnectionError(f"the server has dropped the channel {channel}")
        self._leaving[channel] -= 1


def _notice_of(response: Any) -> Notice | None:
    match response:
        case [b"smessage", bytes(channel), bytes(data)]:
            return Notice(channel.decode(), data)
        case [b"ssubscribe", bytes(channel), _]:
            return Notice(channel.decode())
    return None
