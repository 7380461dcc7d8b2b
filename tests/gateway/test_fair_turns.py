"""A burst of tokens for thousands of streams leaves room for a request that begins meanwhile."""

import asyncio
import gc
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import redis.asyncio

from tidemill._async_listener import AsyncListener
from tidemill._async_subscription import PER_TURN, Subscription, Turns
from tidemill._listener import Notice

_STREAMS = 2_000


class Burst:
    """A connection whose messages are all here at once."""

    def __init__(self) -> None:
        self.messages: deque[list[Any]] = deque()
        #: Channels that are told something as soon as they are listened to.
        self.eager: dict[str, bytes] = {}
        self._has_more = asyncio.Event()

    async def send_command(self, command: str, *channels: str, check_health: bool) -> None:
        """Confirm subscriptions, behind what is on its way already."""
        if command == "SSUBSCRIBE":
            for channel in channels:
                self.messages.append([b"ssubscribe", channel.encode(), 1])
                if channel in self.eager:
                    self.say(channel, self.eager[channel])
        self._has_more.set()

    async def read_response(self, **_: Any) -> list[Any]:
        """Return the next message, without a turn of the loop while there are any."""
        while not self.messages:
            self._has_more.clear()
            await self._has_more.wait()
        return self.messages.popleft()

    async def disconnect(self, nowait: bool) -> None:
        """Nothing is open."""

    # What the listener needs of a pool.
    async def get_connection(self) -> "Burst":
        return self

    async def release(self, connection: "Burst") -> None:
        """Nothing is kept."""

    def say(self, channel: str, text: bytes) -> None:
        """Have a message arrive."""
        self.messages.append([b"smessage", channel.encode(), text])
        self._has_more.set()


def listener_of(burst: Burst) -> AsyncListener:
    return AsyncListener(cast(redis.asyncio.Redis, SimpleNamespace(connection_pool=burst)))


async def started(readers: list[Subscription], served: list[str]) -> list[asyncio.Task[None]]:
    """Let readers wait for two notices each, and note whom they came to."""

    async def read(reader: Subscription) -> None:
        while (notice := await reader.get(30)) is not None:
            served.append(reader.channel)
            if notice.data == b"last":
                return

    tasks = [asyncio.create_task(read(reader)) for reader in readers]
    await asyncio.sleep(0)
    return tasks


async def test_a_new_stream_hears_its_first_token_before_a_burst_is_through() -> None:
    burst = Burst()
    listener = listener_of(burst)
    served: list[str] = []
    running = [listener.listen(f"c{number}") for number in range(_STREAMS)]
    tasks = await started(running, served)
    for reader in running:
        burst.say(reader.channel, b"first")
    while len(served) < 2 * _STREAMS:
        await asyncio.sleep(0)
    served.clear()
    for reader in running:
        burst.say(reader.channel, b"last")
    # Its confirmation and its token come over the same connection, behind all others.
    burst.eager["new"] = b"last"
    tasks += await started([listener.listen("new")], served)
    while not tasks[-1].done():
        await asyncio.sleep(0)
    assert len(served) < _STREAMS / 4
    await asyncio.gather(*tasks)
    assert len(served) == _STREAMS + 2
    await listener.close()


async def test_what_begins_gets_a_turn_of_the_loop_for_every_few_streams() -> None:
    burst = Burst()
    listener = listener_of(burst)
    served: list[str] = []
    running = [listener.listen(f"c{number}") for number in range(_STREAMS)]
    tasks = await started(running, served)
    while len(served) < _STREAMS:
        await asyncio.sleep(0)
    for reader in running:
        burst.say(reader.channel, b"last")
    most, before = 0, len(served)
    while len(served) < 2 * _STREAMS:
        await asyncio.sleep(0)
        most, before = max(most, len(served) - before), len(served)
    assert most <= PER_TURN
    await asyncio.gather(*tasks)
    await listener.close()


async def test_who_comes_late_to_its_turn_takes_all_that_has_come_and_in_order() -> None:
    turns = Turns()
    others = [Subscription(f"c{number}", turns) for number in range(50)]
    reader = Subscription("late", turns)
    got: list[Notice | None] = []

    async def read() -> None:
        got.append(await reader.get(30))
        while (notice := reader.get_nowait()) is not None:
            got.append(notice)

    waiting = [asyncio.create_task(other.get(30)) for other in others]
    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    for other in others:
        other.put(Notice(other.channel, b"x"))
    for number in range(5):
        reader.put(Notice("late", b"%d" % number))
        await asyncio.sleep(0)
    assert not got
    await task
    assert got == [Notice("late", b"%d" % number) for number in range(5)]
    await asyncio.gather(*waiting)


async def test_a_turn_that_comes_after_its_news_was_taken_ends_no_wait() -> None:
    turns = Turns()
    other, reader = Subscription("a", turns), Subscription("b", turns)
    waits = [asyncio.create_task(each.get(30)) for each in (other, reader)]
    await asyncio.sleep(0)
    for each in (other, reader):
        each.put(Notice(each.channel, b"1"))
    assert reader.get_nowait() == Notice("b", b"1")
    assert await waits[0] == Notice("a", b"1")
    for _ in range(5):
        await asyncio.sleep(0)
    # None stands for patience that has ended, so it may not come with the turn.
    assert not waits[1].done()
    reader.put(Notice("b", b"2"))
    assert await waits[1] == Notice("b", b"2")


async def test_a_wait_lasts_as_long_as_its_own_patience_whatever_earlier_ones_had() -> None:
    async def patience_after(first: float, second: float) -> None:
        reader = Subscription("c")
        wait = asyncio.create_task(reader.get(first))
        await asyncio.sleep(0)
        reader.put(Notice("c", b"x"))
        assert await wait == Notice("c", b"x")
        assert await reader.get(second) is None
        ended.append((first, second))

    ended: list[tuple[float, float]] = []
    waits = ((0.01, 0.15), (30.0, 0.02))
    await asyncio.gather(*(patience_after(*each) for each in waits))
    assert ended == [(30.0, 0.02), (0.01, 0.15)]


async def test_a_timer_keeps_no_reader_alive() -> None:
    reader = Subscription("c")
    wait = asyncio.create_task(reader.get(30))
    await asyncio.sleep(0)
    reader.put(Notice("c"))
    assert await wait == Notice("c")
    gone = weakref.ref(reader)
    del reader, wait
    gc.collect()
    assert gone() is None


def test_turns_go_on_in_another_event_loop_when_one_ended_in_a_burst() -> None:
    turns = Turns()

    async def leave_in_a_burst() -> None:
        readers = [Subscription(f"c{number}", turns) for number in range(500)]
        waits = [asyncio.create_task(reader.get(30)) for reader in readers]
        await asyncio.sleep(0)
        for reader in readers:
            reader.put(Notice(reader.channel, b"x"))
        for wait in waits:
            wait.cancel()

    async def read() -> Notice | None:
        reader = Subscription("c", turns)
        wait = asyncio.create_task(reader.get(30))
        await asyncio.sleep(0)
        reader.put(Notice("c", b"x"))
        return await wait

    asyncio.run(leave_in_a_burst())
    assert asyncio.run(read()) == Notice("c", b"x")
