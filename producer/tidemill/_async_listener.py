"""Pub/sub for many readers on one connection, kept alive by a task of its own."""

import asyncio
from collections import deque
from contextlib import suppress

import redis.asyncio
from redis.asyncio.client import PubSub

from tidemill._cancellation import heeding_cancellation
from tidemill._listener import BROKEN, LOST, TICK_SECONDS, Notice, read_notice
from tidemill.protocol.keys import ShardKeys

#: A reader that lags behind by so many messages is better off with the log.
_MAX_PENDING = 512

_REOPEN_WAIT_SECONDS = 0.1

#: redis-py can only read from a connection that is subscribed to something; nobody publishes here.
_IDLE_CHANNEL = ShardKeys().token_channel("none")


class Subscription:
    """One reader's messages of one channel."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._pending: deque[Notice] = deque()
        self._arrival = asyncio.Event()

    async def get(self, timeout: float) -> Notice | None:
        """Return the next notice, or None if there is none for ``timeout`` seconds."""
        if not self._pending:
            self._arrival.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._arrival.wait()
        return self._pending.popleft() if self._pending else None

    def put(self, notice: Notice) -> None:
        """Hand over a notice; too many in a row are told as one loss."""
        if len(self._pending) >= _MAX_PENDING:
            self._pending.clear()
            notice = LOST
        self._pending.append(notice)
        self._arrival.set()


class AsyncListener:
    """All channels of one client on one connection; a broken one is replaced."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._readers: dict[str, list[Subscription]] = {}
        self._pubsub: PubSub | None = None
        # Whoever writes to the connection or drops it holds this; only the task reads.
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def listen(self, channel: str) -> Subscription:
        """Begin to pass the channel's messages to a new reader; it must be discarded again.

        Its first notice is the confirmation.
        """
        reader = Subscription(channel)
        readers = self._readers.setdefault(channel, [])
        readers.append(reader)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="tidemill-listener")
        elif len(readers) == 1:
            try:
                await self._tell("subscribe", channel)
            except BaseException:
                self._forget(reader)
                raise
        else:
            reader.put(Notice(channel))
        return reader

    async def discard(self, reader: Subscription) -> None:
        """Stop passing messages to a reader."""
        self._forget(reader)
        if reader.channel not in self._readers:
            await self._tell("unsubscribe", reader.channel)

    async def close(self) -> None:
        """End the task and give the connection back."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            # Again and again: redis-py may swallow a cancellation.
            task.cancel()
            await asyncio.wait({task}, timeout=_REOPEN_WAIT_SECONDS)
        await self._drop()

    def _forget(self, reader: Subscription) -> None:
        readers = self._readers[reader.channel]
        readers.remove(reader)
        if not readers:
            del self._readers[reader.channel]

    async def _run(self) -> None:
        while True:
            try:
                await self._pass_on()
            except BROKEN:
                await self._drop()
                for readers in self._readers.values():
                    for reader in readers:
                        reader.put(LOST)
                # The readers now ask the server themselves and so learn whether it is gone.
                await asyncio.sleep(_REOPEN_WAIT_SECONDS)

    async def _pass_on(self) -> None:
        pubsub = await self._open()
        while True:
            notice = read_notice(await pubsub.get_message(timeout=TICK_SECONDS))
            if notice is not None:
                for reader in self._readers.get(notice.channel, ()):
                    reader.put(notice)

    async def _open(self) -> PubSub:
        pubsub = self._client.pubsub()
        try:
            await pubsub.subscribe(_IDLE_CHANNEL, *self._readers)
        except BaseException:
            await pubsub.aclose()  # type: ignore[no-untyped-call]
            raise
        async with self._lock:
            self._pubsub = pubsub
            # Readers came and went while the connection was being made.
            subscribed = {name.decode() for name in pubsub.channels} - {_IDLE_CHANNEL}
            for channel in self._readers.keys() - subscribed:
                await pubsub.subscribe(channel)
            for channel in subscribed - self._readers.keys():
                await pubsub.unsubscribe(channel)
        return pubsub

    async def _drop(self) -> None:
        async with self._lock:
            pubsub, self._pubsub = self._pubsub, None
            if pubsub is not None:
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _tell(self, action: str, channel: str) -> None:
        if self._pubsub is None:
            return
        async with self._lock:
            if self._pubsub is not None:
                with heeding_cancellation(), suppress(*BROKEN):
                    # On the same connection the task meets the same error and opens another one.
                    await getattr(self._pubsub, action)(channel)
