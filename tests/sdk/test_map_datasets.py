"""Datasets through ``map``: rows, keys, progress, patience, and what an early end leaves behind."""

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from support.fake_mill import Attempt, FakeMill, generate
from support.serving import by_prompt, num_jobs, num_open, serving
from support.twins import Twin
from support.wait import wait_until
from tidemill import (
    AsyncProducer,
    BrokerUnavailable,
    EmbedSpec,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFinished,
    JobSpec,
    MapProgress,
    Producer,
    Result,
)
from tidemill._items import ItemReader
from tidemill._link import Link
from tidemill._request import MAX_IDEMPOTENCY_KEY_CHARS
from tidemill._submitter import Submitter

pytestmark = pytest.mark.usefixtures("redis_client")


class Table:
    """A dataset as those of Hugging Face: sized, with rows by number, and no more than that."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def rows(num: int) -> list[dict[str, Any]]:
    return [{"id": f"row-{n}", "ids": [1, 2, 3 + n], "note": "..."} for n in range(num)]


def sizes(results: list[Result]) -> list[int]:
    return [len(result.token_ids) for result in results]


@pytest.mark.parametrize("kind", [list, iter, Table])
def test_a_column_of_a_dataset_is_the_prompt(
    producer: Twin, redis_url: str, kind: Callable[[Any], Any]
) -> None:
    with serving(redis_url, by_prompt):
        assert sizes(list(producer.map(kind(rows(4)), prompt="ids"))) == [3, 4, 5, 6]


def test_a_function_of_an_item_makes_its_prompt_or_its_job(producer: Twin, redis_url: str) -> None:
    def prompt(number: int) -> Any:
        return [number] if number % 2 else JobSpec([number], max_tokens=9)

    asked: list[int | None] = []

    def work(attempt: Attempt) -> None:
        asked.append(attempt.request.params.max_tokens)
        by_prompt(attempt)

    with serving(redis_url, work):
        results = list(producer.map([1, 2], prompt=prompt, max_tokens=5))
    assert (sizes(results), sorted(map(str, asked))) == ([1, 2], ["5", "9"])


def test_rows_with_usual_columns_need_no_prompt(producer: Twin, redis_url: str) -> None:
    seen: list[Any] = []

    def work(attempt: Attempt) -> None:
        request = attempt.request
        seen.append([message.content for message in request.messages or ()] or request.prompt_ids)
        attempt.finish(1)

    items = [
        {"prompt_ids": [5], "label": 1},
        {"prompt": [6], "messages": None},
        {"messages": [{"role": "user", "content": "a b"}], "prompt": [7]},
    ]
    with serving(redis_url, work):
        list(producer.map(items, max_in_flight=1))
    assert seen[:2] == [(5,), (6,)]
    assert seen[2] != (7,)


def test_a_row_that_cannot_be_read_is_the_error_of_its_item_alone(
    producer: Twin, redis_url: str
) -> None:
    items: list[Any] = [{"ids": [3]}, {"text": "no ids"}, [1, 2], {"ids": [4]}]
    with serving(redis_url, by_prompt):
        first, second, third, last = producer.map(items, prompt="ids", return_exceptions=True)
    assert sizes([first, last]) == [3, 4]
    assert str(second) == "prompt: a row has no column 'ids', only 'text'"
    assert str(third) == "prompt: list has no columns, so none is 'ids'"
    [nameless] = producer.map([{"a": 1, "b": 2}], return_exceptions=True)
    assert "a row with 'a', 'b' does not say" in str(nameless)


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ("why?", "str is one thing"),
        ({"train": []}, "dict is one thing"),
        (b"why?", "bytes is one thing"),
        (7, "int cannot be iterated"),
        (type("DataFrame", (), {"__iter__": lambda _: iter("ab")})(), "iterates over its columns"),
    ],
    ids=["text", "dict", "bytes", "number", "frame"],
)
def test_what_is_no_dataset_is_refused_at_once(producer: Twin, items: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        next(producer.map(items))


@pytest.mark.parametrize("option", ["prompt", "key", "key_prefix", "progress", "timeout"])
def test_an_option_of_the_wrong_kind_is_refused(producer: Twin, option: str) -> None:
    with pytest.raises(InvalidRequest, match=option):
        next(producer.map([[1]], **{option: object()}))


@pytest.mark.parametrize("ordered", [True, False])
def test_results_come_with_their_items(producer: Twin, redis_url: str, ordered: bool) -> None:
    with serving(redis_url, by_prompt):
        pairs = list(producer.map(rows(20), prompt="ids", with_items=True, ordered=ordered))
    assert sorted(row["id"] for row, _ in pairs) == sorted(row["id"] for row in rows(20))
    assert all(len(result.token_ids) == row["ids"][-1] for row, result in pairs)


def test_errors_come_with_their_items_too(producer: Twin, redis_url: str) -> None:
    items: list[Any] = [[3], ""]
    with serving(redis_url, by_prompt):
        pairs = list(producer.map(items, with_items=True, return_exceptions=True))
    assert [(item, type(outcome)) for item, outcome in pairs] == [
        ([3], Result),
        ("", InvalidRequest),
    ]


def test_a_run_with_a_key_prefix_computes_nothing_twice(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    with serving(redis_url, by_prompt):
        first = list(producer.map(rows(5), prompt="ids", key_prefix="run-1"))
        again = list(producer.map(rows(7), prompt="ids", key_prefix="run-1"))
        assert again[:5] == first
        assert num_jobs(redis_client) == 7
        list(producer.map(rows(5), prompt="ids", key_prefix="run-2"))
    assert num_jobs(redis_client) == 12


@pytest.mark.parametrize("key", ["id", lambda row: row["id"]], ids=["column", "function"])
def test_rows_with_keys_are_found_again_in_any_order(
    producer: Twin, redis_client: redis.Redis, redis_url: str, key: Any
) -> None:
    with serving(redis_url, by_prompt):
        first = list(producer.map(rows(5), prompt="ids", key=key, key_prefix="run"))
        again = list(producer.map(rows(5)[::-1], prompt="ids", key=key, key_prefix="run"))
    assert again == first[::-1]
    assert num_jobs(redis_client) == 5


def test_a_run_that_was_cut_short_goes_on_where_it_was(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill, redis_url: str
) -> None:
    results = producer.map(rows(4), prompt="ids", key_prefix="run", max_in_flight=2)
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.append(next(results)))
    thread.start()
    by_prompt(mill.claim())
    thread.join()
    results.close()  # type: ignore[attr-defined]
    left = mill.claim()
    by_prompt(left)
    with serving(redis_url, by_prompt):
        again = list(producer.map(rows(4), prompt="ids", key_prefix="run"))
    assert again[0] == got[0]
    assert left.job_id in [result.job_id for result in again]
    assert num_jobs(redis_client) == 4


def test_a_run_that_is_made_again_tries_again_what_failed(
    producer: Twin, redis_client: redis.Redis, redis_url: str
) -> None:
    def work(attempt: Attempt) -> None:
        assert attempt.request.prompt_ids is not None
        fails = attempt.request.prompt_ids[-1] == 4 and num_jobs(attempt.client) < 5
        attempt.finish(1, state="failed" if fails else "done")

    def run() -> list[Any]:
        items = rows(3)
        return list(producer.map(items, prompt="ids", key_prefix="r", return_exceptions=True))

    with serving(redis_url, work):
        first, second, third, fourth = run(), run(), run(), run()
    assert [type(outcome) for outcome in first] == [Result, JobFailed, Result]
    assert type(second[1]) is JobFailed
    assert second[1].job_id != first[1].job_id
    assert type(third[1]) is Result
    assert fourth == third
    assert num_jobs(redis_client) == 5


def test_another_prompt_under_the_key_of_a_run_is_a_conflict(
    producer: Twin, redis_url: str
) -> None:
    with serving(redis_url, by_prompt):
        list(producer.map(rows(2), prompt="ids", key_prefix="run"))
        with pytest.raises(IdempotencyConflict):
            list(producer.map(rows(2)[::-1], prompt="ids", key_prefix="run"))


def test_an_item_without_a_key_is_refused(producer: Twin) -> None:
    outcomes = list(
        producer.map([{"ids": [1], "id": None}], prompt="ids", key="id", return_exceptions=True)
    )
    assert str(outcomes[0]) == "key: an item has none"


def test_progress_is_told_from_the_first_item_to_the_last(producer: Twin, redis_url: str) -> None:
    told: list[MapProgress] = []
    items: list[Any] = [*[[n] for n in range(1, 9)], ""]
    with serving(redis_url, by_prompt):
        list(producer.map(items, return_exceptions=True, max_in_flight=3, progress=told.append))
    assert told[-1] == MapProgress(done=9, failed=1, in_flight=0, total=9)
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert max(one.in_flight for one in told) <= 3
    told.clear()
    with serving(redis_url, by_prompt):
        list(producer.map(iter([[1]]), progress=told.append))
    assert told[-1] == MapProgress(done=1, failed=0, in_flight=0, total=None)


def test_a_bar_goes_to_standard_error(
    producer: Twin, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(redis_url, by_prompt):
        assert len(list(producer.map([[1], [2]], progress=True))) == 2
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""


def test_a_bar_takes_nothing_from_a_file_that_output_goes_to(
    producer: Twin,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Standard error is a terminal, standard output is not.
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with serving(redis_url, by_prompt):
        for result in producer.map([[1], [2]], progress=True):
            print(result.text)
    shown = capsys.readouterr()
    assert shown.out == "w0 \nw0 w1 \n"
    assert "2/2" in shown.err


def test_an_error_of_the_prompts_function_is_the_callers(
    producer: Twin, redis_client: redis.Redis
) -> None:
    def prompt(row: dict[str, Any]) -> Any:
        if row["id"] == "row-2":
            raise LookupError("no such row")
        return row["ids"]

    with pytest.raises(LookupError, match="no such row"):
        list(producer.map(rows(4), prompt=prompt, max_in_flight=1 << 10, return_exceptions=True))
    assert num_open(redis_client) == 0


def test_jobs_of_other_kinds_get_keys_and_one_of_their_own_stays() -> None:
    reader = ItemReader({"priority": 1}, key=str, key_prefix="run")
    spec = reader.spec(0, EmbedSpec("a"))
    assert isinstance(spec, EmbedSpec)
    assert (spec.idempotency_key or "").startswith("run:")
    own = reader.spec(0, JobSpec([1], idempotency_key="mine"))
    assert own.idempotency_key == "mine"
    ended = JobCancelled("x", job_id="job_1")
    assert reader.retry(own, ended, is_new=True) is None
    again = reader.retry(own, ended, is_new=False)
    assert again is not None
    assert again.idempotency_key == "mine~job_1"


def test_the_key_of_another_try_is_never_too_long() -> None:
    reader = ItemReader({}, key_prefix="run")
    ended = JobCancelled("x", job_id="job_1")
    keys = {
        again.idempotency_key
        for letter in "ab"
        if (again := reader.retry(JobSpec([1], idempotency_key=letter * 255), ended, is_new=False))
    }
    assert len(keys) == 2
    assert all(len(key or "") <= MAX_IDEMPOTENCY_KEY_CHARS for key in keys)


def test_a_map_in_which_nothing_happens_ends_after_its_timeout(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    with pytest.raises(JobNotFinished, match=r"no job has ended for 0\.2 s; 3 items"):
        list(producer.map([[1], [2], [3]], timeout=0.2))
    assert num_open(redis_client) == 0


def test_what_the_caller_does_with_a_result_is_no_silence_of_the_queue(
    producer: Twin, redis_url: str
) -> None:
    with serving(redis_url, by_prompt):
        results = producer.map([[1], [2], [3]], timeout=0.3, max_in_flight=1)
        next(results)
        threading.Event().wait(0.4)
        assert len(list(results)) == 2


class Row(dict[str, Any]):
    """A row that can be watched as it is forgotten."""

    __hash__ = object.__hash__


def test_rows_and_results_are_forgotten_as_they_are_given_out(
    producer: Twin, redis_url: str
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def source() -> Iterator[Row]:
        for number in range(200):
            row = Row(ids=[1, 2, 1 + number % 3])
            alive.add(row)
            yield row

    with serving(redis_url, by_prompt):
        results = producer.map(source(), prompt="ids", max_in_flight=4, with_items=True)
        for row, _ in results:
            del row
            most = max(most, len(alive))
        gc.collect()
    assert not alive
    assert most <= 4 * 16 + 8


def test_leaving_a_producer_ends_its_maps(
    redis_client: redis.Redis, redis_url: str, mill: FakeMill
) -> None:
    producer = Producer(redis_url)
    results = producer.map([[1], [2], [3]], max_in_flight=3, ordered=False)
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.append(next(results)))
    thread.start()
    mill.claim().finish(1)
    thread.join()
    producer.close()
    assert num_open(redis_client) == 0
    with pytest.raises(StopIteration):
        next(results)


async def test_leaving_an_asynchronous_producer_ends_its_maps(
    redis_client: redis.Redis, redis_url: str, mill: FakeMill
) -> None:
    thread = threading.Thread(target=lambda: mill.claim().finish(1))
    thread.start()
    with pytest.raises(LookupError):
        async with AsyncProducer(redis_url) as producer:
            async for _ in producer.map([[1], [2], [3]], ordered=False):
                raise LookupError
    assert num_open(redis_client) == 0
    thread.join()


async def test_a_cancelled_task_leaves_nothing_of_its_map(
    redis_client: redis.Redis, redis_url: str, mill: FakeMill
) -> None:
    async def run() -> None:
        async with AsyncProducer(redis_url) as producer:
            async for _ in producer.map([[1], [2], [3]]):
                raise AssertionError

    task = asyncio.create_task(run())
    await asyncio.to_thread(wait_until, lambda: num_open(redis_client) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert num_open(redis_client) == 0


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_jobs_are_sent_leaves_none_of_them(
    redis_client: redis.Redis,
    redis_url: str,
    mill: FakeMill,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    send = Submitter.send
    interrupted = False

    def cut_short(self: Submitter, made: Any) -> Any:
        nonlocal interrupted
        if interrupted:
            return send(self, made)
        interrupted = True
        if moment == "after":
            send(self, made)
        raise KeyboardInterrupt

    monkeypatch.setattr(Submitter, "send", cut_short)
    with Producer(redis_url) as producer, pytest.raises(KeyboardInterrupt):
        list(producer.map([[1], [2], [3]]))
    assert num_jobs(redis_client) == 3
    assert num_open(redis_client) == 0


def test_an_interrupt_while_a_map_waits_cancels_what_is_in_flight(
    redis_client: redis.Redis, redis_url: str, mill: FakeMill
) -> None:
    def interrupt() -> None:
        wait_until(lambda: num_open(redis_client) == 3, what="all jobs in the queue")
        # A connection that is interrupted while it is made leaves its socket to the collector.
        wait_until(lambda: len(redis_client.pubsub_shardchannels()) == 3, what="its subscriptions")
        signal.raise_signal(signal.SIGINT)

    with Producer(redis_url) as producer:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            list(producer.map([[1], [2], [3]]))
        thread.join()
    assert num_open(redis_client) == 0


def test_an_interrupt_in_the_body_of_a_loop_cancels_what_is_in_flight(
    redis_client: redis.Redis, redis_url: str, mill: FakeMill
) -> None:
    def serve() -> None:
        generate([1])(mill.claim())

    thread = threading.Thread(target=serve)
    thread.start()

    def loop() -> None:
        with Producer(redis_url) as producer:
            for _ in producer.map([[1], [2], [3]], ordered=False):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    thread.join()
    assert num_open(redis_client) == 0


def test_a_map_that_cannot_cancel_its_jobs_says_that_they_may_go_on(
    mill: FakeMill,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(self: Link, plan: object) -> None:
        raise BrokerUnavailable("the broker is away")

    monkeypatch.setattr(Link, "carry_out", fail)
    with Producer(redis_url) as producer, pytest.raises(JobNotFinished) as raised:
        list(producer.map([[1]], timeout=0.1))
    assert raised.value.__notes__ == ["map: its jobs in flight may go on: the broker is away"]
    assert "may go on" in caplog.text
