"""Jobs that a server accepted and then lost are submitted again by whoever holds their handle."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, FakeMill, text_of
from support.lossy_broker import LossyBroker
from support.twins import MakeTwin, Twin
from support.wait import wait_until
from tidemill import (
    Chunk,
    JobNotFinished,
    JobNotFound,
    JobSpec,
    Result,
    ResultExpired,
)
from tidemill.protocol.functions import ensure_library
from tidemill.service.redis import connect


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LossyBroker]:
    with LossyBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def client(broker: LossyBroker) -> Iterator[redis.Redis]:
    with connect(broker.url, retries=20) as client:
        yield client


@pytest.fixture
def producer(make_twin: MakeTwin, broker: LossyBroker) -> Twin:
    return make_twin(broker.url, timeout=30.0)


class Waiter:
    """Waits for something on a thread of its own."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self._wait = wait
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._wait()
        except Exception as error:  # a test looks at it
            self.outcome = error

    def join(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.outcome


def warm_up(producer: Twin, mill: FakeMill) -> None:
    """Make the salt, so that it comes before the tail of the log that gets lost."""
    producer.submit([9])
    mill.claim().finish()


def test_a_result_of_a_lost_job_comes_from_its_second_run(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    warm_up(producer, mill)
    mark = broker.mark()
    job = producer.submit([1, 2], max_tokens=5)
    request = mill.claim().request
    waiter = Waiter(lambda: job.result(60))
    broker.lose_after(mark)
    again = mill.claim()
    assert (again.job_id, again.request) == (job.id, request)
    again.finish(2)
    result: Result = waiter.join()
    assert (result.job_id, result.token_ids) == (job.id, (0, 1))


def test_a_lost_job_is_found_before_anything_is_read(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    warm_up(producer, mill)
    mark = broker.mark()
    jobs = [producer.submit([1]) for _ in range(3)]
    broker.lose_after(mark)
    assert client.exists(KEYS.job(jobs[0].id)) == 0
    assert jobs[0].status().state == "queued"
    waiter = Waiter(lambda: jobs[1].result(60))
    stream = Waiter(lambda: list(jobs[2].stream()))
    for _ in range(3):
        mill.claim().finish(1)
    assert waiter.join().token_ids == (0,)
    assert [chunk.ids for chunk in stream.join()] == [(0,)]
    assert jobs[0].result(60).token_ids == (0,)


def test_a_lost_job_that_is_watched_is_brought_back(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    warm_up(producer, mill)
    mark = broker.mark()
    job = producer.submit([1])
    broker.lose_after(mark)
    told: list[Result] = []
    watch = job.watch(on_done=told.append)
    mill.claim().finish(2)
    watch.wait(60)
    assert [(result.job_id, len(result.token_ids)) for result in told] == [(job.id, 2)]


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1, 1, 1], [5, 2], [2, 5]])
def test_a_stream_goes_on_where_it_was_when_everything_was_lost(
    producer: Twin, broker: LossyBroker, client: redis.Redis, sizes: list[int]
) -> None:
    mill = FakeMill(client)
    job = producer.submit([1])
    attempt = mill.claim()
    stream = job.stream()
    chunks: list[Chunk] = []
    attempt.say(1)
    attempt.crash()
    attempt = mill.reclaim(attempt)
    attempt.say(2)
    while stream.position < 3:
        chunks.append(next(stream))
    waiter = Waiter(lambda: chunks.extend(stream))
    broker.lose_everything()
    wait_until(lambda: client.exists(KEYS.job(job.id)), 30, "the second submission")
    again = FakeMill(client).claim()
    assert again.fence == 1
    for size in sizes:
        again.say(size)
    again.finish(1)
    waiter.join()
    assert [token for chunk in chunks for token in chunk.ids] == list(range(8))
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(8)))
    assert [c.start for c in chunks] == [0, *(c.end for c in chunks[:-1])]


def test_a_stream_of_a_lost_job_does_not_wait_for_its_end(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    job = producer.submit([1])
    attempt = mill.claim()
    attempt.crash()
    attempt = mill.reclaim(attempt)
    attempt.say(2)
    stream = job.stream()
    assert next(stream).end == 2
    broker.lose_everything()
    waiter = Waiter(lambda: next(stream))
    wait_until(lambda: client.exists(KEYS.job(job.id)), 30, "the second submission")
    again = FakeMill(client).claim()
    again.say(3)
    assert waiter.join().ids == (2,)
    stream.close()
    again.finish()


def test_a_loss_of_tokens_alone_brings_no_second_job(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    job = producer.submit([1])
    attempt = mill.claim()
    attempt.say(1)
    stream = job.stream()
    chunks = [next(stream)]
    mark = broker.mark()
    attempt.say(1)
    chunks.append(next(stream))
    waiter = Waiter(lambda: chunks.extend(stream))
    broker.lose_after(mark)
    attempt.entries, attempt.text = [(1, len(text_of(0)))], text_of(0)
    attempt.say(1)
    attempt.finish(1)
    waiter.join()
    assert [token for chunk in chunks for token in chunk.ids] == [0, 1, 2]
    assert job.status().attempts == 1


def test_a_map_over_a_server_that_loses_everything_is_complete(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    items = [JobSpec([1, n], idempotency_key=f"k{n}" if n % 2 else None) for n in range(6)]
    waiter = Waiter(lambda: list(producer.map(items, max_in_flight=6)))
    attempts = [mill.claim() for _ in range(6)]
    attempts[0].finish(1)
    broker.lose_everything()
    wait_until(lambda: len(list(client.scan_iter(KEYS.job("*")))) >= 5, 30, "second submissions")
    mill = FakeMill(client)
    stop = threading.Event()
    serving = threading.Thread(target=mill.serve, args=(lambda a: a.finish(2), stop))
    serving.start()
    results = waiter.join()
    stop.set()
    serving.join()
    assert len(results) == 6
    assert {result.job_id for result in results} == {attempt.job_id for attempt in attempts}


def test_a_lost_job_waits_for_room_in_the_queue(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    warm_up(producer, mill)
    client.hset(KEYS.settings, "jobs:*", 1)
    mark = broker.mark()
    job = producer.submit([1])
    stream = job.stream(timeout=0.1)
    broker.lose_after(mark)
    client.hset(KEYS.settings, "jobs:*", 0)
    with pytest.raises(JobNotFinished):
        next(stream)
    waiter = Waiter(lambda: job.result(60))
    client.hdel(KEYS.settings, "jobs:*")
    mill.claim().finish(1)
    assert waiter.join().token_ids == (0,)
    assert [chunk.ids for chunk in stream] == [(0,)]


def test_a_forgotten_job_is_not_run_again(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    job = producer.submit([1])
    mill.claim().finish(1)
    client.delete(KEYS.job(job.id), KEYS.token_log(job.id))
    for look in (job.status, job.result, lambda: next(job.stream())):
        with pytest.raises(ResultExpired, match="not kept any more"):
            look()


def test_a_job_whose_end_was_seen_is_not_run_again_after_a_loss(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    seen_by: list[Callable[[Any], object]] = [
        lambda job: job.result(60),
        lambda job: list(job.stream()),
        lambda job: job.status(),
    ]
    jobs = []
    for see in seen_by:
        jobs.append(producer.submit([1]))
        mill.claim().finish(1)
        see(jobs[-1])
    broker.lose_everything()
    for job in jobs:
        with pytest.raises(ResultExpired):
            job.result(60)


def test_a_cancelled_job_is_not_brought_back(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    warm_up(producer, mill)
    mark = broker.mark()
    told, lost = producer.submit([1]), producer.submit([1])
    told.cancel()
    broker.lose_after(mark)
    with pytest.raises(JobNotFound):
        lost.cancel()
    for job in (told, lost):
        with pytest.raises(ResultExpired):
            job.status()
    assert client.xlen(KEYS.ingress("p1:default")) == 0


def test_a_look_at_a_lost_job_does_not_wait_for_room_for_ever(
    make_twin: MakeTwin, broker: LossyBroker, client: redis.Redis
) -> None:
    producer = make_twin(broker.url, timeout=2.0)
    mill = FakeMill(client)
    warm_up(producer, mill)
    mark = broker.mark()
    job = producer.submit([1])
    broker.lose_after(mark)
    client.hset(KEYS.settings, "jobs:*", 0)
    with pytest.raises(JobNotFinished, match="no room to submit it again"):
        job.status()
    client.hdel(KEYS.settings, "jobs:*")
    assert job.status().state == "queued"


def jobs_there(client: redis.Redis) -> set[str]:
    return {key.decode().removeprefix(KEYS.job("")) for key in client.scan_iter(KEYS.job("*"))}


def test_only_the_job_that_was_asked_about_is_brought_back(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    jobs = producer.submit_many([[1]] * 4)
    mill.claim().finish(1)
    # What its readers have not seen may have ended and been forgotten before the restart.
    broker.lose_everything()
    assert jobs[2].status().state == "queued"
    assert jobs_there(client) == {jobs[2].id}


@pytest.mark.parametrize(
    "cancel",
    [
        lambda producer, job: producer.cancel(job.id),
        lambda producer, _: producer.cancel_batch("b"),
        lambda producer, _: producer.cancel_tenant(),
    ],
    ids=["by id", "by batch", "by tenant"],
)
def test_what_this_client_cancelled_stays_ended_however_it_was_cancelled(
    producer: Twin,
    broker: LossyBroker,
    client: redis.Redis,
    cancel: Callable[[Twin, Any], object],
) -> None:
    FakeMill(client)
    [job, twin] = [producer.submit([1], batch="b", idempotency_key="k") for _ in range(2)]
    cancel(producer, job)
    later = producer.submit([1])
    broker.lose_everything()
    for handle in (job, twin):
        with pytest.raises(ResultExpired):
            handle.status()
    assert later.status().state == "queued"
    assert jobs_there(client) == {later.id}


def test_a_job_whose_batch_was_cancelled_by_another_client_has_ended(
    make_twin: MakeTwin, broker: LossyBroker, client: redis.Redis
) -> None:
    FakeMill(client)
    ours, operator = make_twin(broker.url, timeout=30.0), make_twin(broker.url, timeout=30.0)
    jobs = [ours.submit([1], batch="b"), ours.submit([1])]
    operator.cancel_batch("b")
    for job in jobs:
        client.delete(KEYS.job(job.id), KEYS.token_log(job.id))
    broker.kill()
    broker.restart()
    FakeMill(client)
    assert jobs[1].status().state == "queued"
    for look in (jobs[0].status, lambda: jobs[0].result(30), lambda: next(jobs[0].stream())):
        with pytest.raises(ResultExpired):
            look()


def test_two_readers_of_one_lost_job_do_not_take_it_from_each_other(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    FakeMill(client)
    job = producer.submit([1])
    waiters = [Waiter(lambda: job.result(60)) for _ in range(5)]
    waiters += [Waiter(lambda: [c.ids for c in job.stream()]) for _ in range(5)]
    broker.lose_everything()
    wait_until(lambda: client.exists(KEYS.job(job.id)), 30, "the second submission")
    FakeMill(client).claim().finish(2)
    outcomes = [waiter.join() for waiter in waiters]
    assert [result.token_ids for result in outcomes[:5]] == [(0, 1)] * 5
    assert outcomes[5:] == [[(0, 1)]] * 5


def test_a_handle_made_from_an_id_brings_nothing_back(
    producer: Twin, broker: LossyBroker, client: redis.Redis
) -> None:
    FakeMill(client)
    job_id = producer.submit([1]).id
    broker.lose_everything()
    for look in (producer.job(job_id).status, lambda: producer.result(job_id, 60)):
        with pytest.raises(JobNotFound) as failure:
            look()
        assert not isinstance(failure.value, ResultExpired)


def test_a_job_found_by_its_key_goes_on_for_everybody_with_the_same_request(
    make_twin: MakeTwin, broker: LossyBroker, client: redis.Redis
) -> None:
    mill = FakeMill(client)
    first, second = make_twin(broker.url, timeout=30.0), make_twin(broker.url, timeout=30.0)
    made = first.submit([1], temperature=1.0, idempotency_key="k")
    found = second.submit([1], temperature=1.0, idempotency_key="k")
    assert (found.id, found.is_new) == (made.id, False)
    attempt = mill.claim()
    attempt.say(2)
    streams = [made.stream(), found.stream()]
    assert [next(stream).end for stream in streams] == [2, 2]
    broker.lose_everything()
    assert found.status().state == "queued"
    again = FakeMill(client).claim()
    assert (again.job_id, again.request) == (attempt.job_id, attempt.request)
    again.finish(3)
    assert [[chunk.ids for chunk in stream] for stream in streams] == [[(2,)], [(2,)]]


def test_a_key_that_made_another_job_meanwhile_is_told(
    make_twin: MakeTwin, broker: LossyBroker, client: redis.Redis
) -> None:
    FakeMill(client)
    first, second = make_twin(broker.url, timeout=30.0), make_twin(broker.url, timeout=30.0)
    job = first.submit([1], idempotency_key="k")
    broker.lose_everything()
    ensure_library(client)
    FakeMill(client)
    other = second.submit([1], idempotency_key="k")
    with pytest.raises(ResultExpired, match=f"its idempotency key has made {other.id}"):
        job.result(60)
