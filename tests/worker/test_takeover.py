"""A worker dies without a word, and the scheduler gives its jobs to another one."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from support.fake_engine import generate
from support.fake_worker_process import fake_worker
from support.measured import MEASURED
from support.scheduler_process import (
    LEASE_SECONDS,
    LIVENESS_SECONDS,
    SchedulerProcess,
    spawn_scheduler,
    wait_for_leader,
)
from support.shard import KEYS, read_log
from support.wait import wait_until
from support.worker_rig import make_request, submit
from tidemill.protocol.calls import LOG_TTL_MS

NUM_TOKENS = 100
STEP_SECONDS = 0.05
PROMPTS = [(number, number + 1, number + 2) for number in range(1, 9)]


@pytest.fixture
def scheduler(redis_url: str, tmp_path: Path) -> Iterator[SchedulerProcess]:
    scheduler = spawn_scheduler(redis_url, tmp_path / "scheduler.log")
    yield scheduler
    scheduler.kill()


def _owner(client: redis.Redis, job_id: str) -> str:
    return (client.hget(KEYS.job(job_id), "w") or b"").decode()


def _num_tokens(client: redis.Redis, job_id: str) -> int:
    return int(client.hget(KEYS.job(job_id), "n") or 0)


def _seconds_until_they_go_on(client: redis.Redis, cut_at: dict[str, int]) -> float:
    """How long it takes until each of these jobs has a token more than when it was cut."""
    started = time.monotonic()
    wait_until(
        lambda: all(_num_tokens(client, job_id) > cut for job_id, cut in cut_at.items()),
        LIVENESS_SECONDS,
        "the jobs of the dead worker go on",
    )
    return time.monotonic() - started


def test_the_jobs_of_a_killed_worker_go_on_elsewhere(
    redis_client: redis.Redis,
    redis_url: str,
    scheduler: SchedulerProcess,
    record_property: Callable[[str, object], None],
) -> None:
    wait_for_leader(redis_client)
    with ExitStack() as stack:
        workers = dict(
            reversed(stack.enter_context(fake_worker(redis_url, step_seconds=STEP_SECONDS)))
            for _ in range(2)
        )
        jobs = [submit(redis_client, make_request(p, num_tokens=NUM_TOKENS)) for p in PROMPTS]
        wait_until(lambda: all(_num_tokens(redis_client, job_id) > 3 for job_id in jobs), 60)
        victim = _owner(redis_client, jobs[0])
        workers[victim].kill()
        workers[victim].wait(LIVENESS_SECONDS)
        cut_at = {
            job_id: _num_tokens(redis_client, job_id)
            for job_id in jobs
            if _owner(redis_client, job_id) == victim
        }
        assert cut_at and max(cut_at.values()) < NUM_TOKENS
        seconds = _seconds_until_they_go_on(redis_client, cut_at)
        record_property(
            MEASURED,
            f"takeover of {len(cut_at)} jobs of a killed worker: {seconds:.2f} s"
            f" (lease {LEASE_SECONDS:g} s)",
        )
        for job_id, prompt in zip(jobs, PROMPTS, strict=True):
            wait_until(lambda job_id=job_id: read_log(redis_client, job_id).terminals, 30)  # type: ignore[misc]
            log = read_log(redis_client, job_id)
            assert (log.ids, log.terminals) == (generate(prompt, NUM_TOKENS), ["done"])
        assert {_owner(redis_client, job_id) for job_id in jobs} == set(workers) - {victim}
        for key in (KEYS.worker_info, KEYS.commands, KEYS.status):
            assert 0 < redis_client.pttl(key(victim)) <= LOG_TTL_MS
