"""Tokens, status and releases do not wait for each other, and go on when memory is full."""

from typing import cast

import pytest
import redis

from support import shard
from support.shard import KEYS, read_log
from support.worker_rig import Rig, make_request, state_of
from tidemill.protocol.calls import JobRef
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import WorkerStatus
from tidemill_gpuworker.shell.alarm import NEVER, Alarm
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbound import Lane, Outbound
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.shell.releaser import Releaser
from tidemill_gpuworker.shell.status import StatusReporter


class Work:
    """Something to write that fails on command."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_tries = 0
        self.has_work = True

    @property
    def next_due(self) -> float:
        return float("-inf") if self.has_work else NEVER

    def flush(self, *, everything: bool = False) -> int:
        self.num_tries += 1
        if self.error is not None:
            raise self.error
        self.has_work = False
        return 1


class Bench:
    """A writer of three pieces of work."""

    def __init__(self) -> None:
        self.parts = [Work(), Work(), Work()]
        tokens, status, releases = self.parts
        self.alarm = Alarm()
        self.outbound = Outbound(
            self.alarm,
            cast(Publisher, tokens),
            cast(StatusReporter, status),
            cast(Releaser, releases),
        )

    @property
    def num_tries(self) -> list[int]:
        return [part.num_tries for part in self.parts]


@pytest.mark.parametrize("refused", range(3))
def test_what_the_server_refuses_holds_nothing_else_up(refused: int) -> None:
    bench = Bench()
    bench.parts[refused].error = redis.ResponseError("OOM")
    assert bench.outbound.flush() == 2
    assert [part.has_work for part in bench.parts] == [index == refused for index in range(3)]
    for part in bench.parts:
        part.has_work = True
    # Its own delay is not over, and the others do not share it.
    assert bench.outbound.flush() == 2
    assert bench.num_tries == [1 if index == refused else 2 for index in range(3)]
    assert bench.outbound.flush(everything=True) == 2
    assert bench.parts[refused].num_tries == 2
    bench.parts[refused].error = None
    assert bench.outbound.flush(everything=True) == 3
    assert not bench.outbound.has_work


def test_a_server_that_is_away_is_nobodys_fault() -> None:
    bench = Bench()
    bench.parts[0].error = redis.ConnectionError("away")
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            bench.outbound.flush()
    assert bench.num_tries == [2, 0, 0]


def test_a_lane_waits_longer_with_each_refusal_and_at_most_two_seconds() -> None:
    work, now = Work(), [100.0]
    work.error = redis.ResponseError("OOM")
    lane = Lane("tokens", lambda _: work.flush(), lambda: work.next_due, clock=lambda: now[0])
    delays = []
    for _ in range(8):
        lane.flush(everything=False)
        delays.append(lane.wakes_at - now[0])
        now[0] = lane.wakes_at
    assert work.num_tries == 8
    assert delays == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    work.error = None
    assert lane.flush(everything=False) == 1
    assert lane.wakes_at == NEVER


@pytest.mark.leaks_keys
def test_one_release_that_fails_does_not_hold_up_the_others(redis_client: redis.Redis) -> None:
    epoch, jobs = shard.lead(redis_client), JobTable()
    releaser = Releaser(redis_client, KEYS, "wkr_a", jobs, Alarm())
    for index in range(3):
        job_id = shard.submit(redis_client)
        fence = shard.dispatch(redis_client, job_id, epoch).fence
        queue = "p1:broken" if index == 0 else "p1:default"
        jobs.add(Job(JobRef(job_id, queue), fence))
    broken, *healthy = jobs.all()
    redis_client.set(KEYS.ingress("p1:broken"), "not a stream")
    for job in (broken, *healthy):
        releaser.release(job)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        releaser.flush()
    assert {state_of(redis_client, job.job_id) for job in healthy} == {"queued"}
    assert (jobs.all(), releaser.has_work) == ([broken], True)


def test_a_worker_reports_and_ends_its_jobs_while_memory_is_full(
    redis_client: redis.Redis, rig: Rig
) -> None:
    job_id = rig.give(make_request(num_tokens=20))
    redis_client.config_set("maxmemory", 1_000_000)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            redis_client.set("more", "data")
        rig.runner.run_free()
        rig.wait_for(job_id, "done")
        rig.wait_for_status(lambda s: s.generated_tokens == 20 and s.num_running == 0)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert len(read_log(redis_client, job_id).ids) == 20


def test_a_new_status_replaces_one_that_was_not_written(redis_client: redis.Redis) -> None:
    reporter = StatusReporter(redis_client, KEYS, "wkr_a", Alarm())
    for num_running in (1, 2):
        reporter.report(WorkerStatus(num_running=num_running))
    assert (reporter.flush(), reporter.flush()) == (1, 0)
    ((_, fields),) = redis_client.xrange(KEYS.status("wkr_a"))
    assert decode(fields[b"s"], WorkerStatus).num_running == 2
    assert redis_client.pttl(KEYS.status("wkr_a")) > 0
