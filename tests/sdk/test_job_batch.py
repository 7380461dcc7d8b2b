"""Jobs that are collected and queued together, and what is left of a batch that fails."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.serving import by_prompt, num_jobs, num_open, serving
from support.twins import Twin
from tidemill import (
    AsyncProducer,
    BatchClosed,
    BrokerUnavailable,
    ContextExceeded,
    InvalidRequest,
    JobFailed,
    JobNotFinished,
    JobSpec,
    Producer,
    QueueFull,
    UnknownModel,
)
from tidemill._async_submitter import AsyncSubmitter
from tidemill._submitter import Submitter

pytestmark = pytest.mark.usefixtures("redis_client", "mill")


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_jobs_of_a_batch_are_queued_when_its_block_ends(
    producer: Twin, redis_client: redis.Redis
) -> None:
    with producer.batch() as batch:
        places = [batch.submit([1, 2, n], max_tokens=n) for n in (3, 4)]
        assert (places, batch.jobs, num_jobs(redis_client)) == ([0, 1], [], 0)
    assert len(batch.ids) == num_jobs(redis_client) == 2
    assert [job.id for job in batch.jobs] == batch.ids


def test_jobs_of_a_batch_are_sent_in_one_round_trip(
    producer: Twin, redis_client: redis.Redis
) -> None:
    producer.submit([1])
    before = redis_client.info("stats")["total_reads_processed"]
    with producer.batch() as batch:
        for n in range(1, 101):
            batch.submit([n])
    # Ours, and a hundred jobs: a few reads of the server's from its sockets.
    assert redis_client.info("stats")["total_reads_processed"] - before < 20


def test_a_full_group_is_sent_before_the_end(producer: Twin, redis_client: redis.Redis) -> None:
    with producer.batch(size=2) as batch:
        seen = []
        for n in range(1, 6):
            batch.submit([n])
            seen.append(num_jobs(redis_client))
    assert seen == [0, 2, 2, 4, 4]
    assert len(batch.ids) == num_jobs(redis_client) == 5


def test_results_come_in_the_order_of_submission(producer: Twin, redis_url: str) -> None:
    with serving(redis_url, by_prompt):
        with producer.batch(max_tokens=100) as batch:
            for n in (5, 1, 3):
                batch.submit([n])
        assert [len(result.token_ids) for result in batch.results()] == [5, 1, 3]


def test_a_failed_job_is_raised_or_stands_in_its_place(producer: Twin, mill: FakeMill) -> None:
    with producer.batch() as batch:
        batch.submit([1])
        batch.submit([2])
    mill.claim().finish(1)
    mill.claim().finish(state="failed", error="out of luck")
    with pytest.raises(JobFailed, match="out of luck"):
        batch.results()
    first, second = batch.results(return_exceptions=True)
    assert (len(first.token_ids), type(second)) == (1, JobFailed)


def test_waiting_for_results_ends_after_its_timeout(producer: Twin) -> None:
    with producer.batch() as batch:
        batch.submit([1])
    with pytest.raises(JobNotFinished):
        batch.results(timeout=0.05)
    with pytest.raises(JobNotFinished):
        batch.results(timeout=0.05, return_exceptions=True)


def test_options_of_a_job_go_before_those_of_its_batch(producer: Twin, mill: FakeMill) -> None:
    with producer.batch(max_tokens=7, temperature=0.5) as batch:
        batch.submit([1], max_tokens=9)
        batch.submit(JobSpec([2], temperature=0.0))
    sampled = [mill.claim().request.params for _ in range(2)]
    assert [(one.max_tokens, one.temperature) for one in sampled] == [(9, 0.5), (7, 0.0)]


def test_a_named_batch_is_counted_and_cancelled_by_name(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    with producer.batch("night") as batch:
        batch.submit([1])
        batch.submit([2])
    mill.claim().finish(1)
    other = producer.batch("night")
    assert (other.name, other.status().done, other.status().unfinished) == ("night", 1, 1)
    counts = other.cancel()
    assert (counts.cancelled, num_open(redis_client)) == (1, 0)
    with pytest.raises(BatchClosed), producer.batch("night") as late:
        late.submit([3])


def test_a_batch_without_a_name_has_no_counts(producer: Twin, redis_client: redis.Redis) -> None:
    with producer.batch() as batch:
        batch.submit([1])
    with pytest.raises(InvalidRequest, match="no name"):
        batch.status()
    assert batch.cancel().cancelled == 1
    assert num_open(redis_client) == 0


def test_what_is_wrong_with_a_job_is_told_where_it_is_submitted(
    producer: Twin, redis_client: redis.Redis
) -> None:
    with producer.batch() as batch:
        with pytest.raises(InvalidRequest, match="temperature"):
            batch.submit([1], temperature=-1)
        batch.submit([2])
    assert len(batch.jobs) == num_jobs(redis_client) == 1


@pytest.mark.parametrize("size", [0, -1, True, "2"])
def test_a_size_that_is_none_is_refused(producer: Twin, size: Any) -> None:
    with pytest.raises(InvalidRequest, match="size"):
        producer.batch(size=size)


def test_an_error_in_the_block_leaves_nothing_and_says_so(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill
) -> None:
    with pytest.raises(LookupError) as raised, producer.batch(size=3) as batch:
        for n in range(1, 6):
            batch.submit([n])
            if n == 3:
                mill.claim().finish(1)
        raise LookupError("no more")
    assert num_open(redis_client) == 0
    assert num_jobs(redis_client) == 3
    assert notes(raised.value) == ("batch: 5 jobs: 2 cancelled, 1 ended before, 2 never queued")


def test_an_error_in_the_block_leaves_jobs_with_a_key_to_the_next_run(
    producer: Twin, redis_client: redis.Redis
) -> None:
    def run(fails: bool) -> Any:
        with producer.batch(size=2) as batch:
            batch.submit([1], idempotency_key="a")
            batch.submit([2])
            if fails:
                raise LookupError
        return batch

    with pytest.raises(LookupError) as raised:
        run(fails=True)
    assert num_open(redis_client) == 1
    assert notes(raised.value) == (
        "batch: 2 jobs: 1 cancelled, 1 with an idempotency key in the queue"
    )
    kept, fresh = run(fails=False).jobs
    assert (kept.is_new, fresh.is_new) == (False, True)


def test_a_refused_job_takes_the_others_with_it(producer: Twin, redis_client: redis.Redis) -> None:
    with pytest.raises(UnknownModel) as raised, producer.batch() as batch:
        batch.submit([1])
        batch.submit([2], model="none")
        batch.submit([3])
    assert num_open(redis_client) == 0
    assert notes(raised.value) == "batch: 3 jobs: 2 cancelled, 1 refused"


def test_a_refused_job_stands_in_its_place_if_asked_for(
    producer: Twin, redis_client: redis.Redis
) -> None:
    with producer.batch(return_exceptions=True) as batch:
        batch.submit([1])
        batch.submit([1] * 600)
        batch.submit([3])
    assert [isinstance(job, ContextExceeded) for job in batch.jobs] == [False, True, False]
    assert len(batch.ids) == num_open(redis_client) == 2


def test_a_full_queue_is_waited_for_and_nothing_is_queued_twice(
    producer: Twin, redis_client: redis.Redis, mill: FakeMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.protocol.calls.DEFAULT_MAX_QUEUED", 1)
    monkeypatch.setattr(
        "tidemill.protocol.functions.QueueFull",
        lambda message, **_: QueueFull(message, retry_after_seconds=0.02),
    )
    redis_client.hset(KEYS.counters, "q:default", 1_000_000)

    def fill() -> Any:
        with producer.batch() as batch:
            for n in (1, 2, 3):
                batch.submit([n])
        return batch

    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(fill()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    redis_client.hset(KEYS.counters, "q:default", 0)
    thread.join()
    assert len(set(made[0].ids)) == num_jobs(redis_client) == 3
    redis_client.hdel(KEYS.counters, "q:default")


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_batch_that_was_cut_off_goes_on_and_queues_nothing_twice(
    redis_client: redis.Redis,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    is_answered: bool,
) -> None:
    send = Submitter.send

    def cut_off(self: Submitter, made: Any) -> Any:
        if len(made) == 2 and not is_away.is_set():
            is_away.set()
            if is_answered:
                send(self, made)
            raise BrokerUnavailable("the broker is away", fix="Wait.")
        return send(self, made)

    is_away = threading.Event()
    monkeypatch.setattr(Submitter, "send", cut_off)
    with Producer(redis_url) as producer:
        with pytest.raises(BrokerUnavailable) as raised, producer.batch(size=3) as batch:
            for n in range(1, 6):
                batch.submit([n])
        assert notes(raised.value) == (
            "batch: 5 jobs: 3 queued, 2 perhaps queued; the broker is away. Wait. Then send() goes"
            " on and queues none twice, and cancel() ends what was queued."
        )
        batch.send()
    assert len(set(batch.ids)) == num_jobs(redis_client) == num_open(redis_client) == 5


@pytest.mark.parametrize("is_sent", [True, False])
def test_an_interrupt_while_a_batch_is_sent_leaves_nothing(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    send = Submitter.send
    is_cut = threading.Event()

    def cut_short(self: Submitter, made: Any) -> Any:
        if is_cut.is_set():
            return send(self, made)
        is_cut.set()
        if is_sent:
            send(self, made)
        raise KeyboardInterrupt

    monkeypatch.setattr(Submitter, "send", cut_short)
    with (
        Producer(redis_url) as producer,
        pytest.raises(KeyboardInterrupt) as raised,
        producer.batch() as batch,
    ):
        batch.submit([1])
        batch.submit([2])
    assert num_open(redis_client) == 0
    assert notes(raised.value) == "batch: 2 jobs: 2 cancelled"


def test_an_answer_that_is_not_waited_for_is_given_up_unless_it_has_a_key(
    producer: Twin, redis_client: redis.Redis
) -> None:
    with pytest.raises(JobNotFinished):
        producer.generate([1], timeout=0.05)
    assert num_open(redis_client) == 0
    with pytest.raises(JobNotFinished):
        producer.generate([1], timeout=0.05, idempotency_key="k")
    assert num_open(redis_client) == 1


def test_generate_returns_the_whole_answer(producer: Twin, redis_url: str) -> None:
    with serving(redis_url, by_prompt):
        result = producer.generate([1, 2, 3], max_tokens=5)
    assert result.text == "w0 w1 w2 "
    assert result.message == {"role": "assistant", "content": result.text}


def test_generate_raises_what_submitting_raises(producer: Twin) -> None:
    with pytest.raises(UnknownModel):
        producer.generate([1], model="none")


def test_an_interrupt_while_one_job_is_sent_leaves_nothing(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send: Callable[..., Any] = Submitter.send
    is_cut = threading.Event()

    def cut_short(self: Submitter, made: Any) -> Any:
        told = send(self, made)
        if not is_cut.is_set():
            is_cut.set()
            raise KeyboardInterrupt
        return told

    monkeypatch.setattr(Submitter, "send", cut_short)
    with Producer(redis_url) as producer, pytest.raises(KeyboardInterrupt):
        producer.generate([1])
    assert (num_jobs(redis_client), num_open(redis_client)) == (1, 0)


@pytest.mark.parametrize("call", ["batch", "generate", "map"])
async def test_a_task_that_is_cancelled_while_it_sends_leaves_nothing(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    send: Callable[..., Any] = AsyncSubmitter.send
    is_sent = asyncio.Event()

    async def hang(self: AsyncSubmitter, made: Any) -> Any:
        told = await send(self, made)
        if not is_sent.is_set():
            is_sent.set()
            await asyncio.sleep(0.05)
        return told

    async def run() -> None:
        async with AsyncProducer(redis_url) as producer:
            if call == "batch":
                async with producer.batch() as batch:
                    await batch.submit([1])
            elif call == "generate":
                await producer.generate([1])
            else:
                await anext(producer.map([[1]]))

    monkeypatch.setattr(AsyncSubmitter, "send", hang)
    task = asyncio.create_task(run())
    await is_sent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (num_jobs(redis_client), num_open(redis_client)) == (1, 0)
