"""Jobs go back once, behind their last token, whatever happens to the connection."""

from functools import partial
from typing import cast

import pytest
import redis

from support import shard
from support.lossy_redis import LossyRedis
from support.shard import KEYS, read_log
from support.worker_rig import state_of
from tidemill.protocol import calls
from tidemill.protocol.calls import RetryPause
from tidemill.protocol.functions import run
from tidemill.protocol.messages import DEFAULT_RETRIES
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbox import Update
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.shell.releaser import Releaser

PAUSE = RetryPause(base_ms=10_000, cap_ms=25_000)


class Bench:
    """A releaser behind a publisher, one running job, and a connection that breaks on command."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.link = LossyRedis(client)
        self.jobs, self.alarm = JobTable(), Alarm()
        self.lost: list[Job] = []
        self.epoch = shard.lead(client)
        link = cast(redis.Redis, self.link)
        self.releaser = Releaser(
            link, KEYS, "wkr_a", self.jobs, self.alarm, pause=PAUSE, jitter=lambda: 0.5
        )
        self.publisher = Publisher(
            link,
            KEYS,
            "wkr_a",
            self.jobs,
            self.alarm,
            on_lost=self.lost.append,
            on_room=lambda: None,
        )
        self.job = self.take(shard.submit(client))

    def take(self, job_id: str) -> Job:
        fence = shard.dispatch(self.client, job_id, self.epoch).fence
        job = Job(shard.ref_of(self.client, job_id), fence)
        self.jobs.add(job)
        self.publisher.open(job)
        return job

    def fail(self) -> None:
        self.publisher.close(self.job, partial(self.releaser.nack, self.job, "planted"))

    def promote(self) -> None:
        self.client.zadd(KEYS.delayed, {self.job.job_id: 1}, xx=True)
        promote = calls.promote(KEYS, job_id=self.job.job_id, queue=self.job.ref.queue)
        assert run(self.client, promote)

    @property
    def state(self) -> str:
        return state_of(self.client, self.job.job_id)

    @property
    def retries(self) -> int:
        return int(self.client.hget(KEYS.job(self.job.job_id), "rt") or 0)

    @property
    def pause_ms(self) -> float:
        ready = self.client.zscore(KEYS.delayed, self.job.job_id)
        assert ready is not None
        seconds, micros = self.client.time()
        return float(ready) - seconds * 1000 - micros / 1000


@pytest.fixture
def bench(redis_client: redis.Redis) -> Bench:
    return Bench(redis_client)


@pytest.fixture(autouse=True)
def _end(bench: Bench) -> object:
    yield
    shard.cancel(bench.client, bench.job.job_id, "wkr_a")


def test_a_failed_job_goes_back_behind_its_last_token(bench: Bench) -> None:
    bench.publisher.publish([Update(bench.job.job_id, [0, 1, 2], "abc")])
    bench.fail()
    assert (bench.publisher.has_work, bench.releaser.has_work) == (True, False)
    bench.publisher.flush(everything=True)
    assert (bench.publisher.has_work, bench.releaser.has_work) == (False, True)
    assert bench.releaser.has(bench.job)
    assert bench.releaser.flush() == 1
    assert (bench.state, bench.retries, len(bench.jobs)) == ("delayed", 1, 0)
    assert read_log(bench.client, bench.job.job_id).ids == [0, 1, 2]


def test_a_failed_job_without_new_tokens_goes_back_at_once(bench: Bench) -> None:
    bench.fail()
    assert bench.releaser.flush() == 1
    assert bench.state == "delayed"


def test_tokens_whose_reply_was_lost_do_not_keep_a_job(bench: Bench) -> None:
    bench.publisher.publish([Update(bench.job.job_id, [0, 1])])
    bench.fail()
    bench.link.lose_replies = 1
    with pytest.raises(redis.ConnectionError):
        bench.publisher.flush(everything=True)
    bench.publisher.flush(everything=True)
    assert bench.releaser.flush() == 1
    assert (bench.state, bench.lost) == ("delayed", [])
    assert read_log(bench.client, bench.job.job_id).ids == [0, 1]


def test_a_nack_whose_reply_was_lost_uses_up_one_retry(bench: Bench) -> None:
    bench.fail()
    bench.link.lose_replies = 2
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            bench.releaser.flush()
    assert (bench.releaser.flush(), bench.releaser.has_work) == (1, False)
    assert (bench.state, bench.retries, len(bench.jobs)) == ("delayed", 1, 0)


def test_a_nack_that_never_arrived_is_sent_again(bench: Bench) -> None:
    bench.fail()
    bench.link.lose_commands = 2
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            bench.releaser.flush()
    assert (bench.state, len(bench.jobs)) == ("run", 1)
    bench.releaser.flush()
    assert (bench.state, bench.retries) == ("delayed", 1)


def test_the_pause_doubles_up_to_its_bound(bench: Bench) -> None:
    for expected in (5_000, 10_000, 12_500):
        bench.fail()
        bench.releaser.flush()
        assert expected - 5_000 < bench.pause_ms <= expected
        bench.promote()
        bench.job = bench.take(bench.job.job_id)


def test_a_job_without_retries_left_is_dead_and_says_why(bench: Bench) -> None:
    for number in range(DEFAULT_RETRIES + 1):
        bench.fail()
        bench.releaser.flush()
        if number < DEFAULT_RETRIES:
            bench.promote()
            bench.job = bench.take(bench.job.job_id)
    assert bench.state == "dead"
    ((_, letter),) = bench.client.xrange(KEYS.dead_letters)
    assert (letter[b"j"].decode(), letter[b"r"]) == (bench.job.job_id, b"planted")
    assert read_log(bench.client, bench.job.job_id).terminals == ["dead"]


def test_a_job_that_was_cancelled_meanwhile_stays_cancelled(bench: Bench) -> None:
    bench.fail()
    shard.cancel(bench.client, bench.job.job_id, "wkr_a")
    assert bench.releaser.flush() == 1
    assert (bench.state, len(bench.jobs)) == ("cancelled", 0)


def test_a_job_lost_before_its_tokens_are_written_is_not_given_back(bench: Bench) -> None:
    bench.publisher.publish([Update(bench.job.job_id, [0])])
    bench.fail()
    shard.cancel(bench.client, bench.job.job_id, "wkr_a")
    bench.publisher.flush(everything=True)
    assert (bench.lost, bench.releaser.has_work) == ([bench.job], False)


def test_a_nack_by_another_worker_of_the_same_attempt_changes_nothing(bench: Bench) -> None:
    other = Releaser(bench.client, KEYS, "wkr_b", JobTable(), Alarm())
    other.nack(bench.job, "not mine")
    other.flush()
    assert (bench.state, bench.retries) == ("run", 0)


def test_retries_of_jobs_that_failed_together_are_spread(bench: Bench) -> None:
    releaser = Releaser(bench.client, KEYS, "wkr_a", JobTable(), Alarm())
    for _ in range(50):
        releaser.nack(bench.job, "planted")
    shares = [item.jitter for item in releaser._pending]
    assert len(set(shares)) > 40
    assert all(0.5 <= share <= 1.0 for share in shares)
