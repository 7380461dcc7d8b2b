"""Leases live as long as the engine moves, and not longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from support import shard
from support.hung_worker import HANGING_TEXT, HANGS, HANGS_ADDED
from support.shard import KEYS
from support.wait import wait_until
from support.worker_rig import Rig, make_request, state_of, submit
from tidemill.protocol.calls import JobRef
from tidemill.protocol.codec import WIRE_VERSION
from tidemill.protocol.messages import GenerateRequest, ModelCard, WorkerInfo
from tidemill_gpuworker.shell.heartbeat import HUNG_STATUS, Heartbeat
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.registration import Registration
from tidemill_gpuworker.shell.work_clock import WorkClock

INFO = WorkerInfo(
    worker_id="wkr_a",
    model="m",
    num_blocks=8,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    wire_version=WIRE_VERSION,
)
CARD = ModelCard(name="m", revision="r", tokenizer_digest="d", max_model_len=64, vocab_size=100)


class Bench:
    """A heartbeat with a clock that the test moves."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.now = 0.0
        self.jobs = JobTable()
        self.lost: list[Job] = []
        self.exits: list[int] = []
        self.clocks = [WorkClock(lambda: self.now) for _ in range(2)]
        self.registration = Registration(client, KEYS, INFO, CARD, b"bundle", lease_ms=60_000)
        self.heartbeat = Heartbeat(
            client,
            self.registration,
            self.jobs,
            self.clocks,
            max_step_seconds=5.0,
            on_lost=self.lost.append,
            give_up=self.exits.append,
        )

    def hold(self, num_jobs: int) -> list[Job]:
        epoch = shard.lead(self.client)
        for _ in range(num_jobs):
            job_id = shard.submit(self.client)
            fence = shard.dispatch(self.client, job_id, epoch, lease_ms=1_000).fence
            self.jobs.add(Job(JobRef(job_id, "p1:default"), fence))
        return self.jobs.all()

    def lease_of(self, job: Job) -> float:
        return self.client.zscore(KEYS.running, job.job_id) or 0.0


@pytest.fixture
def bench(redis_client: redis.Redis) -> Bench:
    bench = Bench(redis_client)
    bench.registration.register()
    return bench


@pytest.mark.leaks_keys
def test_a_beat_renews_every_lease_of_a_large_worker(bench: Bench) -> None:
    jobs = bench.hold(300)
    before = [bench.lease_of(job) for job in jobs]
    assert bench.heartbeat.beat()
    assert all(bench.lease_of(job) > old + 30_000 for job, old in zip(jobs, before, strict=True))
    assert bench.lost == []


@pytest.mark.leaks_keys
def test_a_beat_reports_what_is_not_ours_any_more(bench: Bench) -> None:
    kept, gone = bench.hold(2)
    shard.expire_lease(bench.client, gone.job_id)
    assert shard.reap(bench.client, gone.job_id) == 1
    bench.heartbeat.beat()
    assert bench.lost == [gone]
    assert bench.jobs.holds(kept)


@pytest.mark.leaks_keys
@pytest.mark.parametrize("thread", [0, 1])
def test_a_thread_that_hangs_stops_the_beat_and_a_slow_one_does_not(
    bench: Bench, thread: int
) -> None:
    (job,) = bench.hold(1)
    with bench.clocks[thread].working():
        bench.now = 4.9
        assert bench.heartbeat.beat()
        renewed = bench.lease_of(job)
        bench.now = 5.1
        assert bench.heartbeat.hangs
        assert not bench.heartbeat.beat()
        assert bench.lease_of(job) == renewed
    assert bench.heartbeat.beat()


def test_much_work_in_short_pieces_and_long_waits_are_no_hang(bench: Bench) -> None:
    for _ in range(10):
        with bench.clocks[0].working():
            bench.now += 4.0
            assert bench.heartbeat.beat()
    bench.now += 1000.0
    assert bench.heartbeat.beat()


def test_a_worker_whose_step_outlives_its_leases_ends_itself(bench: Bench) -> None:
    with bench.clocks[0].working():
        for bench.now in (5.1, 35.0, 64.9):
            bench.heartbeat.beat()
        assert bench.exits == []
        bench.now = 65.1
        bench.heartbeat.beat()
        assert bench.exits == [HUNG_STATUS]


def test_a_worker_that_was_paused_may_end_its_step(bench: Bench) -> None:
    for _ in range(2):
        with bench.clocks[0].working():
            bench.now += 1000.0
            assert not bench.heartbeat.beat()
        assert bench.heartbeat.beat()
    assert bench.exits == []


@pytest.mark.parametrize(
    "request_",
    [
        make_request((HANGS, 1)),
        make_request((HANGS_ADDED, 1)),
        make_request(None, prompt=HANGING_TEXT),
    ],
    ids=["in a step", "when it is added", "when it is read"],
)
def test_a_prompt_that_hangs_its_worker_costs_that_process_alone(
    redis_client: redis.Redis, redis_url: str, epoch: int, request_: GenerateRequest
) -> None:
    command = [sys.executable, "-m", "support.hung_worker", redis_url]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            worker_id = process.stdout.readline().strip()
            job_id = submit(redis_client, request_)
            shard.dispatch(redis_client, job_id, epoch, worker=worker_id, lease_ms=500)
            assert process.wait(20) == HUNG_STATUS
        finally:
            process.kill()
    wait_until(lambda: shard.reap(redis_client, job_id) == 1, what="the lease is over")
    assert redis_client.hget(KEYS.job(job_id), "cr") == b"1"
    shard.cancel(redis_client, job_id)


def test_a_server_that_forgot_everything_is_told_again(bench: Bench) -> None:
    bench.client.flushall()
    bench.heartbeat.beat()
    assert bench.client.hget(KEYS.worker_info("wkr_a"), "info")
    assert bench.client.exists(KEYS.model("m"), KEYS.tokenizer("d")) == 2


def test_a_server_without_our_functions_gets_them(bench: Bench) -> None:
    bench.client.function_flush()
    bench.client.flushall()
    bench.heartbeat.beat()
    assert bench.client.function_list(library="tm2")
    assert bench.client.hget(KEYS.worker_info("wkr_a"), "info")


def test_a_hung_worker_loses_its_job_and_drops_it_later(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    config: dict[str, object] = {
        "max_step_seconds": 0.05,
        "lease_seconds": 60.0,
        "beat_seconds": 0.02,
    }
    with Rig(redis_client, redis_url, epoch, config=config).running() as rig:
        job_id = rig.give(make_request(num_tokens=50))
        wait_until(lambda: not rig.process.is_healthy, what="the step has lasted too long")
        rig.take_away(job_id)
        rig.runner.run_free()
        rig.wait_for_status(lambda status: status.num_running == 0 and status.generated_tokens > 0)
        assert rig.process.is_healthy
        assert state_of(redis_client, job_id) == "queued"
        shard.cancel(redis_client, job_id)
