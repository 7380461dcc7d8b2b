"""Cancelling batches and tenants, and how long a cancellation takes."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from support.fake_mill import KEYS, Attempt, FakeMill
from support.measured import MEASURED
from support.twins import MakeTwin, Twin
from tidemill import (
    BatchClosed,
    BatchStatus,
    CancelCounts,
    InvalidRequest,
    JobCancelled,
    JobSpec,
    Producer,
    _listener,
    _results,
)
from tidemill._sweep import cancel_tenant
from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef, RetryPause
from tidemill.protocol.functions import run
from tidemill.protocol.keys import CONSUMER, GROUP
from tidemill.service.redis import connect


def nack(client: redis.Redis, attempt: Attempt) -> None:
    reference = client.hmget(KEYS.job(attempt.job_id), REF_FIELDS)
    call = calls.nack(
        KEYS,
        JobRef.read(attempt.job_id, reference),
        fence=attempt.fence,
        worker_id=attempt.worker_id,
        error="try again",
        pause=RetryPause(base_ms=60_000),
    )
    run(client, call)


def in_every_state(producer: Twin, mill: FakeMill, client: redis.Redis, **options: str) -> set[str]:
    """Jobs that wait for a time, for a retry, and for the scheduler, were read by it, and run."""
    names = {producer.submit([1], **options).id for _ in range(2)}
    retried, running = mill.claim(), mill.claim()
    assert {retried.job_id, running.job_id} == names
    nack(client, retried)
    running.say(2)
    for priority in (-1, 0, 1):
        names.add(producer.submit([1], priority=priority, **options).id)
    client.xreadgroup(GROUP, CONSUMER, {KEYS.ingress("p1:default"): ">"})
    names.add(producer.submit([1], **options).id)
    names.add(producer.submit([1], delay=3600, **options).id)
    return names


def states(producer: Twin, job_ids: set[str]) -> set[str]:
    return {producer.job_status(job_id).state.value for job_id in job_ids}


def assert_nothing_is_left(client: redis.Redis) -> None:
    counters = client.hgetall(KEYS.counters)
    assert set(counters) <= {b"rb"}, counters
    for key in (KEYS.running, KEYS.delayed, KEYS.due):
        assert client.zcard(key) == 0
    for name in ("p0", "p1", "p2"):
        assert client.xlen(KEYS.ingress(f"{name}:default")) == 0


def test_a_cancelled_batch_ends_in_every_state_and_takes_no_more(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    done = producer.submit([1], batch="b")
    mill.claim().finish(1)
    ours = in_every_state(producer, mill, redis_client, batch="b")
    assert producer.batch("b").status() == BatchStatus("b", 8, 1, 0, 0, 0, 0, is_closed=False)
    assert producer.batch("b").status().unfinished == 7
    other = producer.submit([1], batch="c")
    assert producer.cancel_batch("b") == CancelCounts(cancelled=7, ended=0)
    assert states(producer, ours) == {"cancelled"}
    assert producer.batch("b").status() == BatchStatus("b", 8, 1, 0, 7, 0, 0, is_closed=True)
    assert (done.status().state, other.status().state) == ("done", "queued")
    with pytest.raises(BatchClosed, match="'b' was closed"):
        producer.submit([1], batch="b")
    assert producer.cancel_batch("b") == CancelCounts(0, 0)
    other.cancel()
    assert_nothing_is_left(redis_client)


def test_an_unknown_batch_is_empty(producer: Twin, mill: FakeMill) -> None:
    assert producer.batch("b").status().total == 0
    assert producer.cancel_batch("b") == CancelCounts(0, 0)


@pytest.mark.parametrize("name", ["", "a b", 3])
def test_a_bad_name_of_a_batch_is_refused(producer: Twin, name: str) -> None:
    for act in (producer.batch, producer.cancel_batch):
        with pytest.raises(InvalidRequest, match="not a name of a batch"):
            act(name)


def test_cancelling_a_tenant_ends_its_jobs_in_every_state_and_no_others(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, make_twin: MakeTwin, redis_url: str
) -> None:
    ours = in_every_state(producer, mill, redis_client)
    other = make_twin(redis_url, tenant="other")
    running = other.submit([1], priority=-1).id
    while (attempt := mill.claim()).job_id != running:
        pass
    theirs = {other.submit([1], delay=9).id, other.submit([1], priority=1).id}
    assert producer.cancel_tenant() == CancelCounts(cancelled=7, ended=0)
    assert states(producer, ours) == {"cancelled"}
    assert states(other, theirs) == {"delayed", "queued"}
    assert other.job_status(running).state == "run"
    assert producer.cancel_tenant() == CancelCounts(0, 0)
    attempt.finish()
    assert other.cancel_tenant() == CancelCounts(2, 0)
    assert_nothing_is_left(redis_client)


def test_many_jobs_are_cancelled_over_many_pages(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    for options in ({"delay": 60}, {"batch": "b"}):
        specs = [JobSpec([1], **options) for _ in range(700)]  # type: ignore[arg-type]
        producer.submit_many(specs)
    for _ in range(300):
        mill.claim()
    assert producer.cancel_batch("b") == CancelCounts(700, 0)
    assert producer.cancel_tenant() == CancelCounts(700, 0)
    assert_nothing_is_left(redis_client)


def test_a_job_submitted_after_the_call_is_left_alone(
    mill: FakeMill, redis_client: redis.Redis, redis_url: str
) -> None:
    with Producer(redis_url) as producer:
        before = producer.submit([1])
        plan = cancel_tenant(KEYS, "default")
        seconds, microseconds = redis_client.time()
        assert plan.send(None) is not None
        step = plan.send(int(seconds) * 1000 + int(microseconds) // 1000)
        while redis_client.time() <= (seconds, microseconds + 2000):
            pass
        after = producer.submit([1])
        link = producer._links.home
        with pytest.raises(StopIteration) as end:
            while True:
                reply = link.call_many(step) if isinstance(step, list) else link.read(step)  # type: ignore[arg-type]
                step = plan.send(reply)
        assert end.value.value == CancelCounts(1, 0)
        assert (before.status().state, after.status().state) == ("cancelled", "queued")


def test_a_job_that_moves_while_it_is_cancelled_is_followed(
    mill: FakeMill, redis_client: redis.Redis, redis_url: str
) -> None:
    with Producer(redis_url) as producer:
        job = producer.submit([1], batch="b")
        attempt = mill.claim()
        other = FakeMill(redis_client)
        call_many, moves = producer._links.home.call_many, []

        def move_first(wanted):  # type: ignore[no-untyped-def]
            if wanted and wanted[0].name == "cancel" and not moves:
                moves.append(attempt.crash())
                assert other.claim().job_id == job.id
            return call_many(wanted)

        producer._links.home.call_many = move_first  # type: ignore[method-assign]
        assert producer.cancel_batch("b") == CancelCounts(1, 0)
        assert moves and job.status().state == "cancelled"


@pytest.fixture
def busy_mill(redis_url: str, redis_client: redis.Redis) -> Iterator[None]:
    """A worker that says a token now and then and never finishes."""
    stop = threading.Event()
    with connect(redis_url) as client:
        mill = FakeMill(client)
        thread = threading.Thread(target=mill.serve, args=(lambda attempt: attempt.say(1), stop))
        thread.start()
        yield
        stop.set()
        thread.join()
        mill.end_all()


def test_a_subscriber_hears_of_a_cancellation_by_its_message(
    producer: Twin,
    busy_mill: None,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    # Who missed the message would look at the log in an hour.
    for module in (_listener, _results):
        monkeypatch.setattr(module, "TICK_SECONDS", 3600.0)
    seconds = sorted(seconds_to_hear(producer) for _ in range(100))
    told = f"p50 {seconds[50] * 1000:.1f} ms, p99 {seconds[98] * 1000:.1f} ms"
    record_property(MEASURED, f"cancel to terminal event, {type(producer).__name__}: {told}")


def seconds_to_hear(producer: Twin) -> float:
    """Cancel a job while a reader waits; returns how long it took until that heard of it."""
    job = producer.submit([1])
    stream = job.stream()
    next(stream)
    heard: list[float] = []

    def read() -> None:
        with pytest.raises(JobCancelled):
            next(stream)
        heard.append(time.monotonic())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    called = time.monotonic()
    job.cancel()
    reader.join(30)
    assert heard, "nobody told the reader"
    return heard[0] - called
