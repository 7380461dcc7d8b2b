"""A worker may die at any point of a job's life; another one goes on as if nothing had happened."""

import signal

import pytest
import redis

from support import shard
from support.fake_engine import generate
from support.fake_worker_process import fake_worker
from support.shard import read_log
from support.wait import wait_until
from support.worker_rig import Rig, make_request, result_of, state_of, submit
from tidemill.service.runtime import CRASH_STATUS

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8)]
NUM_TOKENS = 25


def _start_jobs(client: redis.Redis, epoch: int, worker_id: str) -> list[str]:
    jobs = [submit(client, make_request(prompt, num_tokens=NUM_TOKENS)) for prompt in PROMPTS]
    for job_id in jobs:
        assert shard.dispatch(client, job_id, epoch, worker=worker_id, lease_ms=1_000).fence == 1
    return jobs


def _finish_elsewhere(client: redis.Redis, url: str, epoch: int, jobs: list[str]) -> None:
    for job_id in jobs:
        if state_of(client, job_id) == "run":
            wait_until(lambda job_id=job_id: shard.reap(client, job_id) == 1)  # type: ignore[misc]
    with Rig(client, url, epoch).running() as rig:
        rig.runner.run_free()
        for job_id in jobs:
            if state_of(client, job_id) == "queued":
                rig.dispatch(job_id)
            rig.wait_for(job_id, "done")


def _check(client: redis.Redis, jobs: list[str]) -> None:
    for job_id, prompt in zip(jobs, PROMPTS, strict=True):
        expected = generate(prompt, NUM_TOKENS)
        log = read_log(client, job_id)
        assert (log.ids, log.terminals) == (expected, ["done"])
        result = result_of(client, job_id)
        assert list(result.ids) == expected
        assert result.text == "".join(f"{token} " for token in expected)
        assert result.entries[-1][0] == NUM_TOKENS


@pytest.mark.parametrize(
    "crash_at",
    [
        "worker.claimed:2",
        "worker.before_append",
        "worker.before_append:4",
        "worker.after_append:4",
        "worker.before_finish",
        "worker.after_finish",
    ],
)
def test_jobs_of_a_crashed_worker_end_right_elsewhere(
    redis_client: redis.Redis, redis_url: str, epoch: int, crash_at: str
) -> None:
    with fake_worker(redis_url, crash_at) as (process, worker_id):
        jobs = _start_jobs(redis_client, epoch, worker_id)
        assert process.wait(20) == CRASH_STATUS
    _finish_elsewhere(redis_client, redis_url, epoch, jobs)
    _check(redis_client, jobs)


def test_a_paused_worker_that_wakes_up_writes_nothing(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    with fake_worker(redis_url) as (process, worker_id):
        jobs = _start_jobs(redis_client, epoch, worker_id)
        wait_until(lambda: all(read_log(redis_client, job_id).ids for job_id in jobs))
        process.send_signal(signal.SIGSTOP)
        _finish_elsewhere(redis_client, redis_url, epoch, jobs)
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    _check(redis_client, jobs)


def test_a_signal_drains_a_worker_process(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    with fake_worker(redis_url) as (process, worker_id):
        jobs = _start_jobs(redis_client, epoch, worker_id)
        wait_until(lambda: read_log(redis_client, jobs[-1]).ids)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    _check(redis_client, jobs)
