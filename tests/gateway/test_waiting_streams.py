"""Streams that wait cost little: they share their looks at the logs, and tell proxies they live."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
import redis.asyncio
from starlette.types import Message

from tidemill._async_reads import SharedReads
from tidemill._async_subscription import Subscription
from tidemill._reads import Read
from tidemill.gateway import sse
from tidemill.gateway.sse import DONE, EventStream


class Server:
    """Answers each command with its own words; a command "fail" is an error of the server."""

    def __init__(self) -> None:
        self.trips: list[list[Any]] = []
        self.is_away = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def pipeline(self, transaction: bool) -> "Pipeline":
        """Begin a round trip."""
        return Pipeline(self)


class Pipeline:
    """One round trip."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._commands: list[Any] = []

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def execute_command(self, *command: Any) -> None:
        """Collect a command."""
        self._commands.append(command)

    async def execute(self, raise_on_error: bool) -> list[Any]:
        """Answer."""
        self._server.trips.append(self._commands)
        await self._server.may_answer.wait()
        if self._server.is_away:
            raise redis.ConnectionError("away")
        return [
            redis.ResponseError("no") if command[0] == "fail" else command
            for command in self._commands
        ]


def look(*names: str) -> Read[Any]:
    return Read(tuple((name,) for name in names), lambda replies: replies)


def shared(server: Server) -> SharedReads:
    return SharedReads(cast(redis.asyncio.Redis, server))


async def test_reads_of_one_moment_share_a_round_trip_and_get_their_own_replies() -> None:
    server = Server()
    reads = shared(server)
    told = await asyncio.gather(reads.send(look("a", "b")), reads.send(look("c")))
    assert told == [[("a",), ("b",)], [("c",)]]
    assert server.trips == [[("a",), ("b",), ("c",)]]
    assert await reads.send(look("d")) == [("d",)]
    assert len(server.trips) == 2


async def test_a_thousand_reads_of_one_moment_are_a_few_round_trips() -> None:
    server = Server()
    reads = shared(server)
    told = await asyncio.gather(*(reads.send(look(f"c{number}")) for number in range(1000)))
    assert told == [[(f"c{number}",)] for number in range(1000)]
    assert len(server.trips) == 16


async def test_an_error_of_one_read_is_its_own() -> None:
    reads = shared(Server())
    waits = (reads.send(look("a")), reads.send(look("b", "fail")), reads.send(look("c")))
    first, failed, last = await asyncio.gather(*waits, return_exceptions=True)
    assert (first, last) == ([("a",)], [("c",)])
    assert isinstance(failed, redis.ResponseError)


async def test_a_server_that_is_away_is_told_to_all_who_asked() -> None:
    server = Server()
    server.is_away = True
    reads = shared(server)
    waits = [reads.send(look(name)) for name in "ab"]
    failed = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(each) for each in failed] == [redis.ConnectionError] * 2


async def test_a_reader_that_leaves_takes_nothing_from_those_it_shared_with() -> None:
    server = Server()
    server.may_answer.clear()
    reads = shared(server)
    leaving, staying = (asyncio.create_task(reads.send(look(name))) for name in "ab")
    while not server.trips:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    server.may_answer.set()
    assert await staying == [("b",)]
    assert leaving.cancelled()


async def test_a_reader_hears_of_an_error_when_its_client_is_closed() -> None:
    server = Server()
    server.may_answer.clear()
    reads = shared(server)
    asked = asyncio.create_task(reads.send(look("a")))
    while not server.trips:
        await asyncio.sleep(0)
    await reads.close()
    # It was not cancelled, so it must not look as if it had been.
    with pytest.raises(redis.ConnectionError):
        await asked


async def test_for_readers_that_have_left_nobody_sets_out() -> None:
    server = Server()
    reads = shared(server)
    leaving = asyncio.create_task(reads.send(look("a")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await reads.send(look("b")) == [("b",)]
    assert server.trips == [[("b",)]]


async def test_long_waits_that_began_at_different_moments_end_at_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, due = asyncio.get_running_loop(), []

    def call_at(when: float, *_: Any) -> SimpleNamespace:
        due.append(when)
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(loop, "call_at", call_at)
    waits = []
    for moment in (100.001, 100.012, 100.049):
        monkeypatch.setattr(loop, "time", lambda moment=moment: moment)
        waits.append(asyncio.create_task(Subscription("c").get(1.5)))
        await asyncio.sleep(0)
    assert len(set(due)) == 1 and 101.549 <= due[0] <= 101.56
    monkeypatch.undo()
    for wait in waits:
        wait.cancel()


async def test_a_stream_without_news_gets_comments_and_one_with_news_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)
    sent: list[bytes] = []
    has_comments, is_asked = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        await has_comments.wait()
        yield b"data: 2\n\n"

    async def receive() -> Message:
        await is_asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent.count(b": waiting\n\n") == 3:
            has_comments.set()

    await EventStream(body())({"type": "http"}, receive, send)
    comments = [b": waiting\n\n"] * 3
    assert sent == [b"", b"data: 1\n\n", *comments, b"data: 2\n\n", DONE]
    # Nothing is sent behind the end.
    await asyncio.sleep(0.03)
    assert sent[-1] == DONE
