"""The crash matrix, rows of the worker: it dies or pauses, and another one goes on."""

import pytest

from crash import points
from support.crash_stage import NUM_JOBS, SLOW_SECONDS, CrashStage
from support.recorder import PlannedJob, plan_jobs
from support.shard import KEYS
from tidemill import Producer

#: A token of every prompt that makes an engine step fail.
POISON = 100


def test_worker_dies_before_it_reads_what_it_was_given(stage: CrashStage) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    victim = stage.worker()
    victim.pause()
    producer = stage.producer(jobs)
    stage.wait(lambda: stage.client.zcard(KEYS.running) == NUM_JOBS, "all jobs are given out")
    victim.kill()

    stage.worker()

    stage.expect_success(producer)
    ids = stage.judge(jobs)
    # No attempt that was never read counts as a crash of its worker.
    assert all(stage.client.hget(KEYS.job(job_id), "cl") != b"1" for job_id in ids.values())


@pytest.mark.parametrize("point", points.WORKER_POINTS)
def test_worker_dies_in_mid_generation_and_another_goes_on(stage: CrashStage, point: str) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    victim = stage.worker(crash_at=point)
    producer = stage.producer(jobs)
    stage.expect_crash(victim)

    stage.worker()

    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.BEAT_POINTS)
def test_worker_dies_around_a_heartbeat(stage: CrashStage, point: str) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    victim = stage.worker(crash_at=point, step_seconds=2 * SLOW_SECONDS)
    producer = stage.producer(jobs)
    stage.expect_crash(victim)

    stage.worker()

    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.NACK_POINTS)
def test_worker_dies_while_it_gives_a_failing_job_back(stage: CrashStage, point: str) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    victim = stage.worker(crash_at=point, poison=[POISON])
    producer = stage.producer(jobs)
    stage.expect_crash(victim)

    stage.worker()

    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.RELEASE_POINTS)
def test_worker_dies_while_it_gives_its_jobs_back_on_leaving(stage: CrashStage, point: str) -> None:
    jobs = plan_jobs(NUM_JOBS, num_tokens=100)
    stage.leader()
    victim = stage.worker(crash_at=point, step_seconds=SLOW_SECONDS)
    producer = stage.producer(jobs)
    stage.wait_for_tokens(2, NUM_JOBS)
    victim.drain()
    stage.wait(lambda: stage.status_of(victim).draining, "the victim drains")
    victim.drain()  # at once
    stage.expect_crash(victim)

    stage.worker()

    stage.expect_success(producer)
    stage.judge(jobs)


def test_worker_paused_past_its_lease_writes_nothing_any_more(stage: CrashStage) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stale = stage.worker(step_seconds=SLOW_SECONDS)
    producer = stage.producer(jobs)
    stage.wait_for_tokens(3, NUM_JOBS)
    stale.pause()
    stage.worker(step_seconds=SLOW_SECONDS)
    stage.wait(lambda: stage.fences() == {2}, "the jobs run elsewhere")
    stale.resume()

    stage.expect_success(producer)

    stale.drain()
    assert stale.wait() == 0, stage.logs()
    stage.judge(jobs)
    assert stage.fences() == {2}


def test_a_job_that_crashes_every_worker_ends_as_dead_and_spares_its_neighbours(
    stage: CrashStage,
) -> None:
    jobs = plan_jobs(1)
    poisoned = PlannedJob("key-poison", (7, 7, 7), state="dead")
    stage.leader()
    producer = stage.producer([poisoned])
    for _ in range(3):
        stage.expect_crash(stage.worker(crash_at="worker.before_append"))
    stage.wait(lambda: stage.client.xlen(KEYS.dead_letters) == 1, "the job is given up")
    stage.worker()
    neighbour = stage.producer(jobs)

    stage.expect_success(producer, neighbour)

    stage.judge([*jobs, poisoned])


def test_worker_paused_while_its_jobs_are_cancelled_writes_nothing_any_more(
    stage: CrashStage,
) -> None:
    jobs = plan_jobs(NUM_JOBS, state="cancelled")
    stage.leader()
    stale = stage.worker(step_seconds=SLOW_SECONDS)
    producer = stage.producer(jobs)
    stage.wait_for_tokens(3, NUM_JOBS)
    stale.pause()
    with Producer(stage.url) as owner:
        assert {owner.cancel(job_id) for job_id in stage.job_ids()} == {"cancelled"}
    stale.resume()

    stage.expect_success(producer)

    stale.drain()
    assert stale.wait() == 0, stage.logs()
    stage.judge(jobs)
