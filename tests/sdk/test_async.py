"""What only the asynchronous client promises: one subscribed connection, and clean cancellation."""

import asyncio
import errno
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
import redis.asyncio

from support.fake_mill import KEYS, Attempt, FakeMill, text_of
from support.wait import wait_until_async
from tidemill import AsyncProducer, Chunk, JobNotFound, JobSpec, QueueFull, _async_listener
from tidemill._async_link import MAX_CALLS
from tidemill._async_listener import AsyncListener
from tidemill._async_subscription import Subscription
from tidemill._listener import LOST, Notice
from tidemill.protocol.ids import new_job_id
from tidemill.service.redis import connect_async


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer(redis_url) as producer:
        yield producer


def num_subscribed(client: redis.Redis) -> int:
    return len(client.client_list(_type="pubsub"))


def num_channels(client: redis.Redis) -> int:
    return len(client.pubsub_shardchannels(KEYS.token_channel("job_*")))


def num_pings(client: redis.Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])


async def submit(producer: AsyncProducer, mill: FakeMill, num: int) -> list[Attempt]:
    await producer.submit_many([JobSpec([1]) for _ in range(num)])
    return [mill.claim() for _ in range(num)]


async def test_many_streams_share_one_connection(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    attempts = await submit(producer, mill, 20)

    async def read(job_id: str) -> list[Chunk]:
        return [chunk async for chunk in producer.stream(job_id)]

    readers = [asyncio.create_task(read(attempt.job_id)) for attempt in attempts * 2]
    await wait_until_async(lambda: num_channels(redis_client) == 20)
    assert num_subscribed(redis_client) == 1
    for attempt in attempts:
        attempt.say(2)
        await asyncio.sleep(0)
        attempt.finish(1)
    for chunks in await asyncio.gather(*readers):
        assert [token for chunk in chunks for token in chunk.ids] == [0, 1, 2]
    await wait_until_async(lambda: num_channels(redis_client) == 0)


async def test_a_connection_without_readers_is_kept_for_the_next(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    ids = set()
    for attempt in await submit(producer, mill, 3):
        reader = asyncio.create_task(producer.result(attempt.job_id))
        await wait_until_async(lambda: num_channels(redis_client) == 1)
        ids |= {entry["id"] for entry in redis_client.client_list(_type="pubsub")}
        attempt.finish(1)
        await reader
        await wait_until_async(lambda: num_channels(redis_client) == 0)
    assert len(ids) == 1


async def test_no_reader_meets_an_error_of_the_connection_that_all_share(
    redis_url: str, redis_client: redis.Redis
) -> None:
    client = connect_async(redis_url, retries=0)
    listener = AsyncListener(client)
    num_losses, is_over = 0, False

    async def come_and_go(channel: str) -> None:
        nonlocal num_losses
        while not is_over:
            reader = listener.listen(channel)
            while (notice := await reader.get(0.01)) is not None:
                num_losses += notice == LOST
            listener.discard(reader)

    readers = [asyncio.create_task(come_and_go(f"c{number}")) for number in range(30)]
    for _ in range(100):
        redis_client.client_kill_filter(_type="pubsub", skipme=True)
        await asyncio.sleep(0.01)
    is_over = True
    await asyncio.gather(*readers)
    assert num_losses
    reader = listener.listen("c0")
    await wait_until_async(lambda: redis_client.spublish("c0", "x") == 1)
    await wait_until_async(lambda: redis_client.pubsub_shardchannels("c*") == [b"c0"])
    while await reader.get(30) != Notice("c0", b"x"):
        pass
    await listener.close()
    await client.aclose()


class DeadConnection(redis.asyncio.Connection):
    """One of which nothing comes, and to which whatever is sent is lost; a pool of itself too."""

    async def send_command(self, *args: Any, **kwargs: Any) -> None:
        """It arrives nowhere."""

    async def get_connection(self) -> "DeadConnection":
        return self

    async def release(self, connection: "DeadConnection") -> None:
        """Nothing is kept."""

    def listener(self) -> AsyncListener:
        return AsyncListener(cast(redis.asyncio.Redis, SimpleNamespace(connection_pool=self)))


async def test_a_connection_that_the_system_gives_up_is_told_as_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def give_up(**_: Any) -> None:
        raise OSError(errno.ETIMEDOUT, "timed out")

    connection = DeadConnection()
    monkeypatch.setattr(connection._parser, "read_response", give_up)
    listener = connection.listener()
    reader = listener.listen("c")
    assert await reader.get(5) == LOST
    await listener.close()


async def test_a_server_that_is_gone_is_noticed_while_readers_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(**_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(_async_listener, "_QUIET_SECONDS", 0.05)
    connection = DeadConnection()
    monkeypatch.setattr(connection._parser, "read_response", wait)
    listener = connection.listener()
    reader, notice = listener.listen("c"), None
    async with asyncio.timeout(10):
        while notice is None:
            other = listener.listen("other")
            notice = await reader.get(0.01)
            listener.discard(other)
    assert notice == LOST
    await listener.close()


async def test_a_quiet_connection_is_kept(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_async_listener, "_QUIET_SECONDS", 0.7)
    client = connect_async(redis_url)
    listener = AsyncListener(client)
    reader = listener.listen("c")
    assert await reader.get(30) == Notice("c")
    before = num_pings(redis_client)
    await wait_until_async(lambda: num_pings(redis_client) >= before + 2)
    assert await reader.get(0) is None
    await listener.close()
    await client.aclose()


async def test_a_reader_cancelled_at_any_point_ends_and_leaves_nothing(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    [attempt] = await submit(producer, mill, 1)
    for num_turns in range(60):
        task = asyncio.create_task(producer.result(attempt.job_id))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30)
        assert done and task.cancelled(), f"cancelled after {num_turns} turns of the loop"
    await wait_until_async(lambda: num_channels(redis_client) == 0)
    attempt.finish(1)
    assert (await producer.result(attempt.job_id)).token_ids == (0,)


async def test_a_stream_cancelled_at_any_point_leaves_nothing(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    [attempt] = await submit(producer, mill, 1)
    streams = [producer.stream(attempt.job_id) for _ in range(60)]
    for num_turns, stream in enumerate(streams):
        task = asyncio.ensure_future(anext(stream))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30)
        assert done and task.cancelled(), f"cancelled after {num_turns} turns of the loop"
    # The streams are still there: another turn may be taken with each.
    await wait_until_async(lambda: num_channels(redis_client) == 0)
    attempt.finish(1)
    assert [(await anext(stream)).ids for stream in streams] == [(0,)] * 60


async def test_a_stream_that_is_dropped_stops_listening(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    [attempt] = await submit(producer, mill, 1)
    stream = producer.stream(attempt.job_id)
    attempt.say(1)
    assert (await anext(stream)).ids == (0,)
    waiting = asyncio.ensure_future(anext(stream))
    await wait_until_async(lambda: num_channels(redis_client) == 1)
    attempt.say(1)
    assert (await waiting).ids == (1,)
    del stream, waiting
    await wait_until_async(lambda: num_channels(redis_client) == 0)


async def test_a_cancelled_wait_inside_a_timeout_is_a_timeout(
    producer: AsyncProducer, mill: FakeMill
) -> None:
    [attempt] = await submit(producer, mill, 1)
    for seconds in (0.0, 0.0001, 0.001, 0.01):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await producer.result(attempt.job_id)


async def test_a_job_can_be_cancelled_while_its_task_is_being_cancelled(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    [attempt] = await submit(producer, mill, 1)

    async def read_and_clean_up() -> None:
        try:
            await producer.result(attempt.job_id)
        except asyncio.CancelledError:
            await producer.cancel(attempt.job_id)
            raise

    task = asyncio.create_task(read_and_clean_up())
    await wait_until_async(lambda: num_channels(redis_client) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await producer.job_status(attempt.job_id)).state == "cancelled"


async def test_closing_at_any_point_leaves_no_task(mill: FakeMill, redis_url: str) -> None:
    async with AsyncProducer(redis_url) as producer:
        [attempt] = await submit(producer, mill, 1)
    before = asyncio.all_tasks()
    for num_turns in range(40):
        async with AsyncProducer(redis_url) as producer:
            reader = asyncio.create_task(producer.result(attempt.job_id))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait({reader})
        assert asyncio.all_tasks() == before


async def test_a_slow_reader_loses_no_token(producer: AsyncProducer, mill: FakeMill) -> None:
    [attempt] = await submit(producer, mill, 1)
    stream = producer.stream(attempt.job_id)
    attempt.say()
    chunks = [await anext(stream)]
    for _ in range(1500):
        attempt.say()
    attempt.finish()
    chunks += [chunk async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(1501)))


async def test_a_reader_that_lags_far_behind_is_told_of_a_loss_once() -> None:
    reader = Subscription("c")
    for _ in range(600):
        reader.put(Notice("c", b"x"))
    notices = [await reader.get(0) for _ in range(100)]
    assert notices[0] == LOST
    assert notices[1:88] == [Notice("c", b"x")] * 87
    assert notices[88:] == [None] * 12


async def test_a_second_reader_of_a_channel_is_confirmed_as_well(
    redis_url: str, redis_client: redis.Redis
) -> None:
    client = connect_async(redis_url)
    listener = AsyncListener(client)
    first = listener.listen("c")
    assert await first.get(30) == Notice("c")
    second = listener.listen("c")
    assert await second.get(30) == Notice("c")
    redis_client.spublish("c", "x")
    assert await first.get(30) == await second.get(30) == Notice("c", b"x")
    listener.discard(first)
    redis_client.spublish("c", "y")
    assert await second.get(30) == Notice("c", b"y")
    assert await first.get(0) is None
    listener.discard(second)
    await listener.close()
    await client.aclose()


async def test_an_asynchronous_source_can_be_mapped(
    producer: AsyncProducer, mill: FakeMill
) -> None:
    finished = asyncio.Event()

    async def source() -> AsyncIterator[list[int]]:
        yield [1]
        # The next item depends on the first result: it must not be waited for before that.
        await finished.wait()
        yield [2]

    results = producer.map(source(), max_in_flight=8)
    first = asyncio.ensure_future(anext(results))
    attempt = await asyncio.to_thread(mill.claim)
    attempt.finish(1)
    assert (await first).token_ids == (0,)
    finished.set()
    second = asyncio.ensure_future(anext(results))
    attempt = await asyncio.to_thread(mill.claim)
    attempt.finish(2)
    assert (await second).token_ids == (0, 1)
    assert [result async for result in results] == []


async def test_what_ends_while_a_result_is_handled_is_not_forgotten(
    producer: AsyncProducer, mill: FakeMill
) -> None:
    results = producer.map([[1], [2], [3]], max_in_flight=3, ordered=False)
    first = asyncio.ensure_future(anext(results))
    attempts = [await asyncio.to_thread(mill.claim) for _ in range(3)]
    attempts[0].finish(1)
    assert (await first).job_id == attempts[0].job_id
    for attempt in attempts[1:]:
        attempt.finish(1)
        await producer.result(attempt.job_id)
    assert len([result async for result in results]) == 2


async def test_a_map_cancelled_at_any_point_leaves_no_job_running(
    producer: AsyncProducer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    async def consume() -> None:
        async for _ in producer.map([[1], [2], [3]], max_in_flight=2):
            pass

    for num_turns in range(0, 120, 3):
        task = asyncio.create_task(consume())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        unfinished = redis_client.hgetall(KEYS.counters)
        unfinished.pop(b"rb", None)  # what the ended jobs keep
        assert not unfinished, f"after {num_turns} turns of the loop"


async def test_many_calls_at_once_share_few_connections_and_all_are_answered(
    producer: AsyncProducer, redis_client: redis.Redis
) -> None:
    async def look() -> None:
        with pytest.raises(JobNotFound):
            await producer.job_status(new_job_id())

    await asyncio.gather(*(look() for _ in range(5 * MAX_CALLS)))
    assert len(redis_client.client_list()) <= MAX_CALLS + 2


async def test_a_full_server_without_the_functions_is_overloaded(
    producer: AsyncProducer, redis_client: redis.Redis
) -> None:
    [limit] = redis_client.config_get("maxmemory").values()
    redis_client.function_flush()
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueFull, match="memory is full"):
            await producer.cancel_batch("b")
    finally:
        redis_client.config_set("maxmemory", limit)
