"""Tokens reach the log once, whatever happens to the connection or to the server's memory."""

from typing import cast

import pytest
import redis

from support import shard
from support.lossy_redis import LossyRedis
from support.shard import KEYS, read_log
from support.worker_rig import result_of, state_of
from tidemill.protocol.calls import JobRef
from tidemill.protocol.messages import JobEnd, TokenChunk
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbox import PublishPolicy, Update
from tidemill_gpuworker.shell.publisher import Publisher

END = JobEnd(state="done", finish_reason="stop")
POLICY = PublishPolicy(max_unpublished_tokens=4)


class Bench:
    """A publisher with one running job and a connection that breaks on command."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.link = LossyRedis(client)
        self.jobs = JobTable()
        self.lost: list[Job] = []
        self.num_wakes = 0
        self.epoch = shard.lead(client)
        self.publisher = Publisher(
            cast(redis.Redis, self.link),
            KEYS,
            "wkr_a",
            self.jobs,
            Alarm(),
            on_lost=self.lost.append,
            on_room=self._wake,
            policy=POLICY,
        )
        self.job = self.new_job()

    def new_job(self) -> Job:
        job_id = shard.submit(self.client)
        fence = shard.dispatch(self.client, job_id, self.epoch).fence
        job = Job(JobRef(job_id, "p1:default"), fence)
        self.jobs.add(job)
        self.publisher.open(job)
        return job

    def generate(self, *ids: int, end: JobEnd | None = None) -> None:
        text = "".join(f"<{token}>" for token in ids)
        self.publisher.publish([Update(self.job.job_id, ids, text, end)])

    def flush(self) -> int:
        return self.publisher.flush(everything=True)

    def _wake(self) -> None:
        self.num_wakes += 1


@pytest.fixture
def bench(redis_client: redis.Redis) -> Bench:
    return Bench(redis_client)


def _finish(bench: Bench, *ids: int) -> list[int]:
    bench.generate(*ids, end=END)
    while bench.publisher.has_work:
        bench.flush()
    assert state_of(bench.client, bench.job.job_id) == "done"
    log = read_log(bench.client, bench.job.job_id)
    assert log.terminals == ["done"]
    assert list(result_of(bench.client, bench.job.job_id).ids) == log.ids
    return log.ids


def test_a_lost_reply_writes_nothing_twice(bench: Bench) -> None:
    bench.generate(1, 2)
    bench.link.lose_replies = 1
    with pytest.raises(redis.ConnectionError):
        bench.flush()
    bench.generate(3)
    bench.flush()
    assert _finish(bench, 4) == [1, 2, 3, 4]
    result = result_of(bench.client, bench.job.job_id)
    assert result.entries == ((2, 6), (4, 6))


def test_a_lost_reply_to_the_end_leaves_one_end(bench: Bench) -> None:
    bench.generate(1, end=END)
    bench.link.lose_replies = 2
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            bench.flush()
    bench.flush()
    assert (bench.publisher.has_work, len(bench.jobs), bench.lost) == (False, 0, [])
    assert read_log(bench.client, bench.job.job_id).terminals == ["done"]


def test_commands_that_never_arrived_are_sent_again(bench: Bench) -> None:
    bench.generate(1)
    bench.link.lose_commands = 3
    for _ in range(3):
        with pytest.raises(redis.ConnectionError):
            bench.flush()
    assert _finish(bench, 2) == [1, 2]


def test_a_log_that_a_failover_cut_short_is_repaired(bench: Bench) -> None:
    for token in (1, 2, 3):
        bench.generate(token)
        bench.flush()
    _cut_log(bench.client, bench.job.job_id, keep=1)
    bench.generate(4)
    bench.flush()
    assert _finish(bench, 5) == [1, 2, 3, 4, 5]


def test_an_end_repairs_the_log_too(bench: Bench) -> None:
    for token in (1, 2, 3):
        bench.generate(token)
        bench.flush()
    _cut_log(bench.client, bench.job.job_id, keep=2)
    assert _finish(bench, 4) == [1, 2, 3, 4]
    assert result_of(bench.client, bench.job.job_id).text == "<1><2><3><4>"


def test_tokens_of_an_earlier_attempt_are_written_again_if_the_log_lost_them(
    bench: Bench,
) -> None:
    earlier = (TokenChunk(start=0, end=2, ids=(1, 2), text="<1><2>"),)
    bench.publisher.open(bench.job, earlier)
    assert _finish(bench, 3) == [1, 2, 3]
    assert result_of(bench.client, bench.job.job_id).text == "<1><2><3>"


def test_a_stale_attempt_writes_nothing_and_is_reported(bench: Bench) -> None:
    bench.generate(1)
    bench.flush()
    shard.expire_lease(bench.client, bench.job.job_id)
    assert shard.reap(bench.client, bench.job.job_id) == 1
    bench.generate(2)
    bench.flush()
    assert bench.lost == [bench.job]
    assert read_log(bench.client, bench.job.job_id).ids == [1]
    assert not bench.publisher.has_work
    shard.cancel(bench.client, bench.job.job_id)


def test_a_stale_attempt_cannot_end_the_job(bench: Bench) -> None:
    shard.expire_lease(bench.client, bench.job.job_id)
    assert shard.reap(bench.client, bench.job.job_id) == 1
    bench.generate(1, end=END)
    bench.flush()
    assert bench.lost == [bench.job]
    assert state_of(bench.client, bench.job.job_id) == "queued"
    shard.cancel(bench.client, bench.job.job_id)


def test_one_lost_job_does_not_hold_up_the_others(bench: Bench) -> None:
    lost, healthy = bench.job, bench.new_job()
    shard.cancel(bench.client, lost.job_id, "wkr_a")
    bench.publisher.publish([Update(job.job_id, [1], "a") for job in (lost, healthy)])
    bench.flush()
    assert bench.lost == [lost]
    assert read_log(bench.client, healthy.job_id).ids == [1]
    bench.job = healthy
    assert _finish(bench) == [1]


@pytest.mark.leaks_keys
def test_an_end_that_the_server_fails_on_holds_up_nobody(bench: Bench) -> None:
    broken, healthy = bench.job, bench.new_job()
    bench.client.delete(KEYS.token_log(broken.job_id))
    bench.client.set(KEYS.token_log(broken.job_id), "not a stream")
    bench.publisher.publish([Update(job.job_id, [1], "<1>", END) for job in (broken, healthy)])
    assert bench.flush() == 1
    assert state_of(bench.client, healthy.job_id) == "done"
    assert state_of(bench.client, broken.job_id) == "run"
    assert (bench.jobs.all(), bench.publisher.num_unpublished) == ([broken], 1)
    bench.client.delete(KEYS.token_log(broken.job_id))
    assert bench.flush() == 1
    assert read_log(bench.client, broken.job_id).ids == [1]
    assert (len(bench.jobs), bench.publisher.has_work) == (0, False)


def test_a_full_publisher_asks_for_a_pause_and_ends_it(bench: Bench) -> None:
    bench.generate(1, 2, 3)
    assert not bench.publisher.is_full
    bench.generate(4)
    assert bench.publisher.is_full
    bench.link.lose_commands = 1
    with pytest.raises(redis.ConnectionError):
        bench.flush()
    assert (bench.publisher.is_full, bench.num_wakes) == (True, 0)
    bench.flush()
    assert (bench.publisher.is_full, bench.num_wakes) == (False, 1)
    assert _finish(bench, 5) == [1, 2, 3, 4, 5]


def test_forgotten_tokens_do_not_count_as_unpublished(bench: Bench) -> None:
    bench.generate(1, 2, 3, 4)
    bench.publisher.forget(bench.job)
    assert (bench.publisher.num_unpublished, bench.flush()) == (0, 0)
    shard.cancel(bench.client, bench.job.job_id, "wkr_a")


def test_all_jobs_of_a_flush_share_one_round_trip(bench: Bench) -> None:
    jobs = [bench.job, *(bench.new_job() for _ in range(9))]
    bench.publisher.publish([Update(job.job_id, [1], "a") for job in jobs])
    before = _num_calls(bench.client, "fcall")
    assert bench.flush() == 10
    assert _num_calls(bench.client, "fcall") == before + 1
    for job in jobs:
        bench.job = job
        assert _finish(bench) == [1]


def _num_calls(client: redis.Redis, command: str) -> int:
    stats = client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def _cut_log(client: redis.Redis, job_id: str, keep: int) -> None:
    """What is left after a replica took over that had not seen the last entries."""
    entries = client.xrange(KEYS.token_log(job_id))
    client.delete(KEYS.token_log(job_id))
    for entry_id, fields in entries[: keep + 1]:
        client.xadd(KEYS.token_log(job_id), fields, id=entry_id)
    client.hset(KEYS.job(job_id), "n", str(keep))
