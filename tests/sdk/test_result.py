"""Results, cancelling and looking at jobs."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.shard import DEAD, expire_lease
from support.twins import Twin
from support.wait import wait_until
from tidemill import (
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFinished,
    JobNotFound,
    JobState,
    Result,
    Usage,
    _cancel,
)
from tidemill.protocol import calls
from tidemill.protocol.calls import JobRef
from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id


class Outcome:
    """What a call on another thread came to."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except Exception as error:
            self.value = error

    def wait(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.value


def wait_for_subscriber(client: redis.Redis, job_id: str) -> None:
    channel = KEYS.token_channel(job_id)
    wait_until(lambda: client.pubsub_shardnumsub(channel)[0][1] > 0, what="a subscriber")


def num_looks(client: redis.Redis) -> int:
    return int(client.info("commandstats")["cmdstat_hmget"]["calls"])


def test_a_result_is_all_that_the_worker_stored(producer: Twin, mill: FakeMill) -> None:
    job_id = producer.submit([1, 2, 3]).id
    attempt = mill.claim()
    attempt.say(2)
    attempt.finish(1, tail="!")
    assert producer.result(job_id) == Result(
        job_id=job_id,
        state=JobState.DONE,
        text="w0 w1 w2 !",
        token_ids=(0, 1, 2),
        finish_reason="stop",
        stop_reason=None,
        usage=Usage(prompt_tokens=3, completion_tokens=3),
    )


def test_a_result_is_waited_for_without_polling(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    outcome = Outcome(lambda: producer.result(job_id))
    wait_for_subscriber(redis_client, job_id)
    before = num_looks(redis_client)
    for _ in range(500):
        attempt.say()
    # An append looks at the job once. A reader that did so for each message would double that.
    assert num_looks(redis_client) - before - 500 < 50
    attempt.finish()
    assert outcome.wait().usage.completion_tokens == 500


def test_a_result_that_takes_too_long_is_not_finished(producer: Twin, mill: FakeMill) -> None:
    job_id = producer.submit([1]).id
    for timeout in (0.0, 0.05):
        with pytest.raises(JobNotFinished) as failure:
            producer.result(job_id, timeout)
        assert failure.value.job_id == job_id
    mill.claim().finish(1)
    assert producer.result(job_id, 5).text == "w0 "


def test_the_end_is_noticed_although_its_message_was_lost(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    outcome = Outcome(lambda: producer.result(job_id))
    wait_for_subscriber(redis_client, job_id)
    with redis_client.pipeline() as pipe:
        # In one transaction, so that nobody is subscribed when the message goes out.
        for client in redis_client.client_list(_type="pubsub"):
            pipe.client_kill_filter(_id=client["id"])
        pipe.spublish(KEYS.token_channel(job_id), "junk")
        pipe.execute()
    attempt.finish(1)
    assert outcome.wait().token_ids == (0,)


def test_a_failed_job_raises_with_what_it_had(producer: Twin, mill: FakeMill) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    attempt.say(2)
    attempt.finish(state="failed", error="the engine broke")
    with pytest.raises(JobFailed, match="failed: the engine broke") as failure:
        producer.result(job_id)
    assert failure.value.state == "failed"
    assert isinstance(failure.value.result, Result)
    assert failure.value.result.token_ids == (0, 1)
    assert failure.value.result.error == "the engine broke"


def test_a_dead_job_raises_with_what_its_log_has(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    attempt.say(2)
    expire_lease(redis_client, job_id)
    reap = calls.reap(KEYS, JobRef(job_id, "p1:default"), end=DEAD, max_crashes=0)
    assert run(redis_client, reap) == 2
    with pytest.raises(JobFailed, match="dead: crashed its workers") as failure:
        producer.result(job_id)
    assert failure.value.state == "dead"
    assert failure.value.result is not None and failure.value.result.text == "w0 w1 "


def test_cancelling_a_queued_job_ends_it(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1], idempotency_key="k").id
    assert producer.cancel(job_id) is JobState.CANCELLED
    assert redis_client.xlen(KEYS.ingress("p1:default")) == 0
    with pytest.raises(JobCancelled) as failure:
        producer.result(job_id)
    assert failure.value.result is not None and failure.value.result.token_ids == ()


def test_cancelling_a_running_job_keeps_what_it_had_and_tells_its_worker(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    attempt.say(700)
    for _ in range(600):
        attempt.say()
    outcome = Outcome(lambda: producer.result(job_id))
    wait_for_subscriber(redis_client, job_id)
    assert producer.cancel(job_id) is JobState.CANCELLED
    failure = outcome.wait()
    assert isinstance(failure, JobCancelled)
    partial = failure.result
    assert isinstance(partial, Result)
    assert partial.token_ids == tuple(range(1300))
    assert partial.text == attempt.text
    assert partial.usage.completion_tokens == 1300
    assert partial.finish_reason == "cancelled"
    commands = redis_client.xrange(KEYS.commands(attempt.worker_id))
    assert [fields[b"k"] for _, fields in commands] == [b"run", b"cancel"]


def test_cancelling_twice_or_too_late_tells_the_final_state(producer: Twin, mill: FakeMill) -> None:
    job_id = producer.submit([1]).id
    assert producer.cancel(job_id) is JobState.CANCELLED
    assert producer.cancel(job_id) is JobState.CANCELLED
    done = producer.submit([1]).id
    mill.claim().finish(1)
    assert producer.cancel(done) is JobState.DONE
    assert producer.result(done).text == "w0 "


def test_cancelling_follows_a_job_to_its_next_worker(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    original, seen = _cancel.cancel_call, []

    def cancel_after_a_move(job_id: str, where: Any) -> Any:
        seen.append(where.worker_id)
        if len(seen) == 1:
            attempt.crash()
            FakeMill(redis_client).claim()
        return original(job_id, where)

    for module in ("tidemill._jobs", "tidemill._async_jobs"):
        monkeypatch.setattr(f"{module}.cancel_call", cancel_after_a_move)
    assert producer.cancel(job_id) is JobState.CANCELLED
    assert len(seen) == 2
    assert seen[0] != seen[1]


def test_nothing_is_known_of_a_job_that_never_was(
    producer: Twin, redis_client: redis.Redis
) -> None:
    job_id = new_job_id()
    for call in (producer.result, producer.cancel, producer.job_status):
        with pytest.raises(JobNotFound) as failure:
            call(job_id)
        assert failure.value.job_id == job_id
        with pytest.raises(InvalidRequest, match="job_id"):
            call("job_1")


def test_a_jobs_status_follows_it(producer: Twin, mill: FakeMill) -> None:
    before = time.time() * 1000 - 60_000
    job_id = producer.submit([1], priority=3).id
    queued = producer.job_status(job_id)
    assert (queued.state, queued.model, queued.priority) == (JobState.QUEUED, "m", 3)
    assert queued.submitted_ms > before
    assert (queued.dispatched_ms, queued.first_token_ms, queued.ended_ms) == (None, None, None)
    attempt = mill.claim()
    attempt.say(4)
    running = producer.job_status(job_id)
    assert (running.state, running.num_tokens, running.attempts) == (JobState.RUNNING, 4, 1)
    assert running.first_token_ms is not None
    attempt.finish()
    ended = producer.job_status(job_id)
    assert ended.state is JobState.DONE
    assert ended.ended_ms is not None and ended.ended_ms >= running.first_token_ms


def test_a_handle_does_what_its_producer_does(producer: Twin, mill: FakeMill) -> None:
    job = producer.submit([1])
    assert (job.is_new, job.status().state) == (True, "queued")
    mill.claim().finish(2)
    assert job.result(30) == producer.result(job.id)
    assert [chunk.end for chunk in job.stream(after=0)] == [2]
    assert producer.job(job.id).cancel() == "done"


def test_a_job_in_an_unknown_state_is_told_as_such(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1]).id
    key = KEYS.job(job_id)
    before = redis_client.hget(key, "st")
    redis_client.hset(key, "st", b"dreaming")
    with pytest.raises(MalformedMessage, match=f"{job_id}: .*dreaming"):
        producer.result(job_id)
    redis_client.hset(key, "st", before)
    mill.claim()
