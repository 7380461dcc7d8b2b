"""Functions that are called as jobs go on."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from support.fake_mill import FakeMill, generate
from support.serving import by_prompt, num_open, serving
from support.twins import AsyncTwin, Twin
from support.wait import wait_until
from tidemill import (
    AsyncProducer,
    Chunk,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFinished,
    JobNotFound,
    Producer,
    Result,
    TidemillError,
)

pytestmark = pytest.mark.usefixtures("redis_client", "mill")


def test_each_token_is_told_once_and_then_the_result(producer: Twin, mill: FakeMill) -> None:
    told: list[Any] = []
    job = producer.submit([1])
    watch = job.watch(on_token=told.append, on_done=told.append, on_error=told.append)
    attempt = mill.claim()
    for _ in range(3):
        attempt.say()
    attempt.finish(1)
    watch.wait(10)
    *chunks, result = told
    assert [type(one) for one in told] == [Chunk] * len(chunks) + [Result]
    assert [i for chunk in chunks for i in chunk.ids] == [0, 1, 2, 3]
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert (watch.is_over, watch.job_id) == (True, job.id)


def test_tokens_are_told_as_they_come(producer: Twin, mill: FakeMill) -> None:
    told: list[Chunk] = []
    watch = producer.submit([1]).watch(on_token=told.append)
    attempt = mill.claim()
    for num in (1, 2):
        attempt.say()
        wait_until(lambda: len(told) == num)  # noqa: B023
    assert not watch.is_over
    attempt.finish()
    watch.wait(10)


def test_tokens_behind_a_position_are_told(producer: Twin, redis_url: str) -> None:
    told: list[Chunk] = []
    job = producer.submit([1])
    with serving(redis_url, generate([2, 2, 2])):
        job.result()
    job.watch(on_token=told.append, after=4).wait(10)
    assert [i for chunk in told for i in chunk.ids] == [4, 5]


@pytest.mark.parametrize("with_tokens", [True, False])
def test_a_failure_is_told_with_what_there_is(
    producer: Twin, mill: FakeMill, with_tokens: bool
) -> None:
    told: list[Any] = []
    tokens: list[Chunk] = []
    options = {"on_token": tokens.append} if with_tokens else {}
    watch = producer.submit([1]).watch(on_error=told.append, **options)
    attempt = mill.claim()
    attempt.say(2)
    attempt.finish(state="failed", error="out of luck")
    watch.wait(10)
    [error] = told
    assert isinstance(error, JobFailed)
    assert error.result is not None
    assert error.result.token_ids == (0, 1)
    assert [i for chunk in tokens for i in chunk.ids] == ([0, 1] if with_tokens else [])


def test_a_cancelled_job_and_one_that_never_was_are_told(producer: Twin) -> None:
    told: list[TidemillError] = []
    job = producer.submit([1])
    watch = job.watch(on_error=told.append)
    job.cancel()
    watch.wait(10)
    missing = producer.job(f"{job.id[:-4]}0000")
    for options in ({}, {"on_token": told.append}):
        missing.watch(on_error=told.append, **options).wait(10)
    assert [type(error) for error in told] == [JobCancelled, JobNotFound, JobNotFound]


def test_a_failure_that_nobody_asks_for_is_logged(
    producer: Twin, caplog: pytest.LogCaptureFixture, mill: FakeMill
) -> None:
    watch = producer.submit([1]).watch(on_done=print)
    mill.claim().finish(state="failed", error="out of luck")
    watch.wait(10)
    assert "out of luck" in caplog.text


def test_an_error_of_a_callback_ends_its_watch_alone(
    producer: Twin, caplog: pytest.LogCaptureFixture, redis_url: str
) -> None:
    told: list[Result] = []

    def fail(chunk: Chunk) -> None:
        raise LookupError("of the callback")

    watches = [
        producer.submit([1]).watch(on_token=fail, on_done=told.append),
        producer.submit([2]).watch(on_done=told.append),
    ]
    with serving(redis_url, generate([1])):
        with pytest.raises(LookupError, match="of the callback"):
            watches[0].wait(10)
        watches[1].wait(10)
    assert len(told) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_error_of_ours_in_a_callback_is_not_told_as_the_jobs(
    producer: Twin, redis_url: str
) -> None:
    told: list[TidemillError] = []

    def fail(result: Result) -> None:
        raise InvalidRequest("mine", field="f")

    watch = producer.submit([1]).watch(on_done=fail, on_error=told.append)
    with serving(redis_url, by_prompt), pytest.raises(InvalidRequest, match="mine"):
        watch.wait(10)
    assert told == []


def test_a_stopped_watch_calls_nothing_more_and_its_job_goes_on(
    producer: Twin, mill: FakeMill
) -> None:
    told: list[Any] = []
    job = producer.submit([1])
    watch = job.watch(on_token=told.append, on_done=told.append)
    attempt = mill.claim()
    attempt.say()
    wait_until(lambda: told)
    watch.stop()
    watch.wait(10)
    attempt.say()
    attempt.finish()
    assert len(job.result().token_ids) == 2
    assert len(told) == 1


def test_waiting_for_a_watch_ends_after_its_timeout(producer: Twin) -> None:
    job = producer.submit([1])
    watch = job.watch(on_done=print)
    with pytest.raises(JobNotFinished):
        watch.wait(0.05)
    assert not watch.is_over
    job.cancel()


@pytest.mark.parametrize("options", [{}, {"on_done": 7}, {"on_done": print, "after": "x"}])
def test_a_watch_that_makes_no_sense_is_refused(producer: Twin, options: dict[str, Any]) -> None:
    job = producer.submit([1])
    with pytest.raises(InvalidRequest):
        job.watch(**options)
    with pytest.raises(InvalidRequest):
        producer.job("none").watch(on_done=print)


def test_hundreds_of_watches_take_one_thread_and_few_connections(
    redis_client: redis.Redis, redis_url: str
) -> None:
    told: list[Result] = []
    with Producer(redis_url) as producer:
        jobs = producer.submit_many([[1, 1 + n % 3] for n in range(200)])
        threads = threading.active_count()
        clients = int(redis_client.info("clients")["connected_clients"])
        watches = [job.watch(on_done=told.append) for job in jobs]  # type: ignore[union-attr]
        assert threading.active_count() == threads + 1
        with serving(redis_url, by_prompt):
            for watch in watches:
                watch.wait(30)
        assert int(redis_client.info("clients")["connected_clients"]) <= clients + 70
    assert len(told) == 200
    assert threading.active_count() == threads


def test_closing_the_producer_ends_its_watches_and_no_job(
    make_twin: Callable[..., Twin], redis_client: redis.Redis, redis_url: str
) -> None:
    producer = make_twin(redis_url)
    watch = producer.submit([1]).watch(on_done=print)
    if isinstance(producer, AsyncTwin):
        producer._thread.run(producer.producer.close())
    else:
        producer.close()
    watch.wait(10)
    assert watch.is_over
    assert num_open(redis_client) == 1


def test_a_callback_may_submit_and_close(redis_url: str) -> None:
    seen: list[str] = []
    is_closed = threading.Event()

    def go_on(result: Result) -> None:
        seen.append(result.text)
        if len(seen) < 3:
            producer.submit([1, 1 + len(seen)]).watch(on_done=go_on)
        else:
            producer.close()
            is_closed.set()

    producer = Producer(redis_url)
    with serving(redis_url, by_prompt):
        producer.submit([1]).watch(on_done=go_on)
        assert is_closed.wait(20)
    assert seen == ["w0 ", "w0 w1 ", "w0 w1 w2 "]


async def test_a_callback_of_an_asynchronous_watch_may_be_a_coroutine(
    redis_url: str, mill: FakeMill
) -> None:
    told: list[str] = []

    async def tell(result: Result) -> None:
        await asyncio.sleep(0)
        told.append(result.text)

    def serve() -> None:
        by_prompt(mill.claim())

    async with AsyncProducer(redis_url) as producer:
        job = await producer.submit([1, 2])
        watch = job.watch(on_done=tell)
        await asyncio.gather(asyncio.to_thread(serve), watch.wait(10))
    assert told == ["w0 w1 "]
