"""Readers that do not keep up are cut off by the server and lose nothing by it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.fake_mill import KEYS, Attempt, FakeMill, text_of
from support.wait import wait_until
from tidemill import AsyncProducer, Chunk, Producer

#: What the server keeps for a reader that does not read, beside the socket's own buffers.
_LIMIT_BYTES = 64 * 1024
_TOKENS_PER_CHUNK = 200


@pytest.fixture(autouse=True)
def small_limit(redis_client: redis.Redis) -> Iterator[None]:
    """The server has little patience with slow readers."""
    name = "client-output-buffer-limit"
    before = redis_client.config_get(name)[name]
    redis_client.config_set(name, f"pubsub {_LIMIT_BYTES} 0 0")
    yield
    redis_client.config_set(name, before)


def num_cut(client: redis.Redis) -> int:
    return int(client.info("stats")["client_output_buffer_limit_disconnections"])


def flood(client: redis.Redis, attempt: Attempt) -> None:
    """Say more than anybody who does not read can hold, until the server has cut somebody off."""
    before = num_cut(client)
    while num_cut(client) == before:
        assert attempt.num_tokens < 500_000, "the server holds on to a reader that does not read"
        attempt.say(_TOKENS_PER_CHUNK)
    # The reader has missed these for certain.
    attempt.say(_TOKENS_PER_CHUNK)


def wait_for_subscriber(client: redis.Redis, job_id: str) -> None:
    channel = KEYS.token_channel(job_id)
    wait_until(lambda: client.pubsub_shardnumsub(channel)[0][1] > 0, what="a subscriber")


def assert_whole(chunks: list[Chunk], num_tokens: int) -> None:
    assert [token for chunk in chunks for token in chunk.ids] == list(range(num_tokens))
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(num_tokens)))


def test_a_thread_that_does_not_read_is_cut_off_and_goes_on_exactly(
    redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    with Producer(redis_url) as producer, producer.submit([1]).stream() as stream:
        attempt = mill.claim()
        first = threading.Thread(target=lambda: chunks.append(next(stream)))
        chunks: list[Chunk] = []
        first.start()
        wait_for_subscriber(redis_client, attempt.job_id)
        attempt.say()
        first.join()
        for _ in range(2):
            flood(redis_client, attempt)
            while stream.position < attempt.num_tokens:
                chunks.append(next(stream))
            wait_for_next(redis_client, attempt, stream, chunks)
        attempt.finish(3)
        chunks += stream
    assert_whole(chunks, attempt.num_tokens)


def wait_for_next(client: redis.Redis, attempt: Attempt, stream: object, chunks: list) -> None:  # type: ignore[type-arg]
    """Let the reader subscribe again and hear one more token."""
    reader = threading.Thread(target=lambda: chunks.append(next(stream)))  # type: ignore[call-overload]
    reader.start()
    wait_for_subscriber(client, attempt.job_id)
    attempt.say()
    reader.join()


async def test_a_blocked_event_loop_is_cut_off_and_all_its_readers_go_on_exactly(
    redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    async def read(job_id: str, chunks: list[Chunk]) -> None:
        async for chunk in producer.stream(job_id):
            chunks.append(chunk)

    async with AsyncProducer(redis_url) as producer:
        jobs = [await producer.submit([1]) for _ in range(2)]
        attempts = [mill.claim() for _ in jobs]
        outputs: list[list[Chunk]] = [[], []]
        readers = [
            asyncio.create_task(read(attempt.job_id, chunks))
            for attempt, chunks in zip(attempts, outputs, strict=True)
        ]
        for attempt, chunks in zip(attempts, outputs, strict=True):
            while not chunks:
                await asyncio.to_thread(wait_for_subscriber, redis_client, attempt.job_id)
                attempt.say()
                await asyncio.sleep(0.05)
        # The loop stands still all the while.
        flood(redis_client, attempts[0])
        attempts[1].say(5)
        for attempt in attempts:
            attempt.finish(3)
        await asyncio.gather(*readers)
    for attempt, chunks in zip(attempts, outputs, strict=True):
        assert_whole(chunks, attempt.num_tokens)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stopped_process_is_cut_off_and_goes_on_exactly(
    redis_url: str, mill: FakeMill, redis_client: redis.Redis, tmp_path: Path, is_async: bool
) -> None:
    with Producer(redis_url) as producer:
        job = producer.submit([1])
        attempt = mill.claim()
        output = tmp_path / "output"
        code = _ASYNC_READER if is_async else _READER
        with output.open("w") as file:
            reader = subprocess.Popen([sys.executable, "-c", code, redis_url, job.id], stdout=file)
        wait_for_subscriber(redis_client, job.id)
        attempt.say()
        wait_until(lambda: output.read_text() == text_of(0), 30, "the first token")
        os.kill(reader.pid, signal.SIGSTOP)
        flood(redis_client, attempt)
        os.kill(reader.pid, signal.SIGCONT)
        wait_until(lambda: output.read_text().endswith(text_of(attempt.num_tokens - 1)), 30)
        attempt.finish(2)
        assert reader.wait(30) == 0
    assert output.read_text() == "".join(map(text_of, range(attempt.num_tokens)))


_READER = """
import sys, tidemill
with tidemill.Producer(sys.argv[1]) as producer:
    for chunk in producer.stream(sys.argv[2]):
        print(chunk.text, end="", flush=True)
"""

_ASYNC_READER = """
import asyncio, sys, tidemill
async def main():
    async with tidemill.AsyncProducer(sys.argv[1]) as producer:
        async for chunk in producer.stream(sys.argv[2]):
            print(chunk.text, end="", flush=True)
asyncio.run(main())
"""
