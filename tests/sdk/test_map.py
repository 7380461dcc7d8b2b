"""Many jobs through a bounded window."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, Attempt, FakeMill, generate
from support.serving import by_prompt, num_open, serving
from support.twins import Twin
from support.wait import wait_until
from tidemill import (
    InvalidRequest,
    JobFailed,
    JobSpec,
    QueueFull,
    Result,
    UnknownModel,
)
from tidemill._window import REORDER_FACTOR, Window
from tidemill.protocol.codec import MAX_RESULT_BYTES
from tidemill.protocol.errors import MalformedMessage, ProtocolError, UnsupportedVersion


def prompts(num: int) -> list[list[int]]:
    return [[1, 2, 3 + index] for index in range(num)]


def test_results_come_in_the_order_of_the_prompts(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    with serving(redis_url, by_prompt):
        results = list(producer.map(prompts(100), max_in_flight=8))
    assert [len(result.token_ids) for result in results] == list(range(3, 103))


def test_unordered_results_come_as_they_end(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    results = producer.map(prompts(3), max_in_flight=3, ordered=False, seed=1)
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.extend(results))
    thread.start()
    attempts = [mill.claim() for _ in range(3)]
    for num, attempt in enumerate(reversed(attempts), start=1):
        attempt.finish(num)
        wait_until(lambda: len(got) == num)  # noqa: B023
    thread.join()
    assert [result.job_id for result in got] == [a.job_id for a in reversed(attempts)]


def test_a_map_does_not_stream_unless_told_to(producer: Twin, redis_url: str) -> None:
    streamed: list[bool] = []

    def work(attempt: Attempt) -> None:
        streamed.append(attempt.request.stream)
        attempt.finish(1)

    with serving(redis_url, work):
        list(producer.map([[1]]))
        list(producer.map([[1]], stream=True))
    assert streamed == [False, True]


def test_no_more_jobs_are_in_flight_than_allowed_and_prompts_are_read_as_needed(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    pulled, most = 0, 0

    def source() -> Iterator[list[int]]:
        nonlocal pulled
        for prompt in prompts(60):
            pulled += 1
            yield prompt

    def work(attempt: Attempt) -> None:
        nonlocal most
        most = max(most, num_open(attempt.client))
        attempt.finish(1)

    with serving(redis_url, work):
        results = producer.map(source(), max_in_flight=5)
        assert pulled == 0, "nothing happens before the first result is asked for"
        for taken, _ in enumerate(results, start=1):
            assert pulled <= taken + 5 * REORDER_FACTOR
    assert pulled == 60
    assert 1 < most <= 5


def test_a_slow_head_does_not_stop_the_others(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    results = producer.map(prompts(20), max_in_flight=2)
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.extend(results))
    thread.start()
    head = mill.claim()
    for _ in range(19):
        mill.claim().finish(1)
    assert got == []
    head.finish(2)
    thread.join()
    assert [len(result.token_ids) for result in got] == [2] + [1] * 19


def test_a_slow_source_does_not_hold_up_what_is_ready(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    def source() -> Iterator[list[int]]:
        yield [1]
        wait_until(lambda: num_open(redis_client) == 0 or None)
        yield [2]

    with serving(redis_url, generate([1])):
        assert len(list(producer.map(source(), max_in_flight=8))) == 2


def test_the_first_error_is_raised_and_the_rest_is_cancelled(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    results = producer.map(prompts(6), max_in_flight=3)
    failures: list[BaseException] = []

    def consume() -> None:
        try:
            list(results)
        except JobFailed as error:
            failures.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    first, *_ = [mill.claim() for _ in range(3)]
    first.finish(state="failed", error="out of luck")
    thread.join()
    assert "out of luck" in str(failures[0])
    assert num_open(redis_client) == 0
    states = [redis_client.hget(key, "st") for key in redis_client.scan_iter(match=KEYS.job("*"))]
    assert sorted(state or b"" for state in states) == [b"cancelled", b"cancelled", b"failed"]


def test_a_map_that_is_given_up_cancels_what_is_in_flight(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    done = 0

    def only_two(attempt: Attempt) -> None:
        nonlocal done
        done += 1
        if done <= 2:
            attempt.finish(1)

    with serving(redis_url, only_two):
        results = producer.map(prompts(10), max_in_flight=4)
        next(results)
        next(results)
        results.close()  # type: ignore[attr-defined]
        wait_until(lambda: num_open(redis_client) == 0)


def test_jobs_with_a_key_outlast_a_map_that_is_given_up(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    items = [JobSpec([index], idempotency_key=f"run:{index}") for index in (1, 2)]
    results = producer.map([*items, [3]], max_in_flight=3, ordered=False)
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.append(next(results)))
    thread.start()
    attempts = [mill.claim() for _ in range(3)]
    attempts[0].finish(1)
    thread.join()
    results.close()  # type: ignore[attr-defined]
    assert producer.job_status(attempts[1].job_id).state == "run"
    assert producer.job_status(attempts[2].job_id).state == "cancelled"
    attempts[1].finish(2)
    again = list(producer.map(items))
    assert [result.job_id for result in again] == [attempt.job_id for attempt in attempts[:2]]


def test_errors_take_the_place_of_results_if_asked_for(producer: Twin, redis_url: str) -> None:
    def work(attempt: Attempt) -> None:
        assert attempt.request.prompt_ids is not None
        failed = attempt.request.prompt_ids == (2,)
        attempt.finish(1, state="failed" if failed else "done")

    items: list[Any] = [[1], "", [2], JobSpec([3], model="none"), [4]]
    with serving(redis_url, work):
        outcomes = list(producer.map(items, return_exceptions=True))
    kinds = [Result, InvalidRequest, JobFailed, UnknownModel, Result]
    assert [type(outcome) for outcome in outcomes] == kinds


def test_a_full_queue_is_waited_for(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.protocol.calls.DEFAULT_MAX_QUEUED", 1)
    monkeypatch.setattr(
        "tidemill.protocol.functions.QueueFull",
        lambda message, **_: QueueFull(message, retry_after_seconds=0.02),
    )
    redis_client.hset(KEYS.counters, "q:default", 1_000_000)
    results = producer.map(prompts(3), max_in_flight=3)
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.extend(results))
    thread.start()
    refusals = redis_client.info("commandstats").get("cmdstat_fcall", {}).get("calls", 0)
    wait_until(
        lambda: redis_client.info("commandstats")["cmdstat_fcall"]["calls"] > refusals + 3,
        what="more tries",
    )
    redis_client.hset(KEYS.counters, "q:default", 0)
    for _ in range(3):
        mill.claim().finish(1)
    thread.join()
    assert len(got) == 3
    redis_client.hdel(KEYS.counters, "q:default")


def test_a_rate_limit_is_waited_for(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    seconds, microseconds = redis_client.time()
    redis_client.config_resetstat()
    # Twenty requests a second, and none left now.
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    redis_client.hset(KEYS.settings, "rpm:*", 1200)
    redis_client.hset(KEYS.rate_buckets("default"), mapping={"r": 0, "at": now_ms})
    redis_client.expire(KEYS.rate_buckets("default"), 60)
    with serving(redis_url, generate([1])):
        assert len(list(producer.map(prompts(10), max_in_flight=10))) == 10
    assert redis_client.info("errorstats")["errorstat_RATELIMITED"]["count"] >= 1


def test_two_items_with_one_key_share_a_job(producer: Twin, redis_url: str) -> None:
    items = [JobSpec([1], idempotency_key="k"), JobSpec([2]), JobSpec([1], idempotency_key="k")]
    with serving(redis_url, generate([1])):
        results = list(producer.map(items))
    assert results[0] == results[2]
    assert results[0].job_id != results[1].job_id


def test_a_run_that_is_repeated_finds_its_jobs_again(producer: Twin, redis_url: str) -> None:
    items = [JobSpec([index], idempotency_key=f"run:{index}") for index in range(1, 6)]
    with serving(redis_url, generate([1])):
        first = list(producer.map(items))
        assert list(producer.map(items)) == first


def test_one_key_for_all_jobs_is_refused(producer: Twin) -> None:
    with pytest.raises(InvalidRequest, match="cannot share"):
        next(producer.map([[1], [2]], idempotency_key="k"))


@pytest.mark.parametrize("max_in_flight", [0, -1])
def test_a_window_without_room_is_refused(producer: Twin, max_in_flight: int) -> None:
    with pytest.raises(InvalidRequest, match="max_in_flight"):
        next(producer.map([[1]], max_in_flight=max_in_flight))


def test_nothing_in_is_nothing_out(producer: Twin) -> None:
    assert list(producer.map([])) == []


def test_an_error_of_the_source_is_the_callers(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    def source() -> Iterator[list[int]]:
        yield [1]
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(producer.map(source(), max_in_flight=1 << 10))
    assert num_open(redis_client) == 0


def test_a_window_bounds_what_is_started_and_what_is_held() -> None:
    window: Window[str] = Window(2, ordered=True)
    assert [window.start(), window.start()] == [0, 1]
    assert not window.has_room
    for index in range(1, 2 * REORDER_FACTOR - 1):
        window.finish(index, str(index))
        assert window.has_room
        assert window.start() == index + 1
    window.finish(2 * REORDER_FACTOR - 1, "last")
    assert not window.has_room, "the head is too far behind"
    assert window.pop() == []
    window.finish(0, "0")
    assert len(window.pop()) == 2 * REORDER_FACTOR
    assert (window.num_in_flight, window.has_room, window.is_empty) == (0, True, True)


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (b"\x01\xc1", MalformedMessage),
        (b"\x02\x80", UnsupportedVersion),
        (b"\x01" + bytes(MAX_RESULT_BYTES + 1), MalformedMessage),
    ],
    ids=["not msgpack", "of a later version", "too large"],
)
def test_an_unreadable_result_is_the_error_of_its_job_alone(
    producer: Twin,
    redis_client: redis.Redis,
    redis_url: str,
    stored: bytes,
    error: type[ProtocolError],
) -> None:
    # Finished before the map runs, so that all are read at once.
    with serving(redis_url, by_prompt):
        jobs = [producer.submit(prompt, idempotency_key=str(prompt)) for prompt in prompts(3)]
        for job in jobs:
            producer.result(job.id)
    redis_client.hset(KEYS.job(jobs[1].id), "res", stored)
    specs = [JobSpec(prompt, idempotency_key=str(prompt), stream=True) for prompt in prompts(3)]
    outcomes = list(producer.map(specs, return_exceptions=True))
    assert [len(outcomes[index].token_ids) for index in (0, 2)] == [3, 5]
    assert isinstance(outcomes[1], error)
    assert jobs[1].id in str(outcomes[1])
    with pytest.raises(error, match=jobs[1].id):
        producer.result(jobs[1].id)
