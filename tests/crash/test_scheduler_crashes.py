"""The crash matrix, rows of the scheduler: it dies or pauses, and its standby leads."""

import time
from collections.abc import Callable

import pytest

from crash import points
from support.actors import Actor
from support.crash_stage import NUM_JOBS, SLOW_SECONDS, CrashStage
from support.measured import MEASURED
from support.recorder import PlannedJob, plan_jobs
from support.shard import KEYS
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import JobResult
from tidemill.service.runtime import CRASH_STATUS

Measure = Callable[[str, object], None]

#: A lease of workers so long that none counts as silent because it has had nothing to do.
PATIENT_SECONDS = 60.0


def failover(stage: CrashStage, victim: Actor, measure: Measure, name: str) -> None:
    """Wait until the victim is dead and its standby leads; report how long that took."""
    epoch = stage.epoch
    assert victim.wait() in (CRASH_STATUS, -9), stage.logs()
    started = time.monotonic()
    stage.wait_for_epoch(epoch + 1)
    measure(MEASURED, f"failover after {name}: {time.monotonic() - started:.2f} s")


@pytest.mark.parametrize("point", points.DISPATCH_POINTS)
def test_scheduler_dies_with_jobs_in_its_hands_and_its_standby_gives_them_out(
    stage: CrashStage, record_property: Measure, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    victim = stage.scheduler(crash_at=point)
    stage.wait_for_epoch(1)
    stage.scheduler()
    producer = stage.producer(jobs)

    failover(stage, victim, record_property, point)

    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.REAP_POINTS)
def test_scheduler_dies_while_it_reaps_a_dead_worker(
    stage: CrashStage, record_property: Measure, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    victim = stage.leader(crash_at=point)
    stage.scheduler()
    dead = stage.worker(crash_at="worker.after_append:3")
    producer = stage.producer(jobs)
    stage.expect_crash(dead)

    failover(stage, victim, record_property, point)

    stage.worker()
    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.PROMOTE_POINTS)
def test_scheduler_dies_while_it_lets_delayed_jobs_run(
    stage: CrashStage, record_property: Measure, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS, options={"delay": 0.2})
    stage.worker()
    victim = stage.leader(crash_at=point)
    stage.scheduler()
    producer = stage.producer(jobs)

    failover(stage, victim, record_property, point)

    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.EXPIRE_POINTS)
def test_scheduler_dies_while_it_ends_jobs_whose_deadline_has_passed(
    stage: CrashStage, record_property: Measure, point: str
) -> None:
    # The slow worker is at some of them, the others wait; none can be done in time.
    jobs = plan_jobs(NUM_JOBS, num_tokens=100, options={"deadline": 0.3}, state="expired")
    stage.worker(step_seconds=SLOW_SECONDS)
    victim = stage.leader(crash_at=point)
    stage.scheduler()
    producer = stage.producer(jobs)

    failover(stage, victim, record_property, point)

    stage.expect_success(producer)
    stage.judge(jobs)


@pytest.mark.parametrize("point", points.FRONT_DOOR_POINTS)
def test_scheduler_dies_while_it_serves_the_front_door(
    stage: CrashStage, record_property: Measure, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    victim = stage.leader(crash_at=point)
    stage.scheduler()
    entries = stage.knock(jobs)

    failover(stage, victim, record_property, point)

    stage.answers(jobs, entries)
    stage.wait(lambda: all(stage.state_of(job) == "done" for job in stage.job_ids()), "all done")
    stage.judge(jobs)
    assert stage.client.xlen(KEYS.front_door) == 0
    assert not any(stage.client.exists(KEYS.front_reply(entry)) for entry in entries)


def test_scheduler_is_killed_in_mid_generation_and_its_standby_leads(
    stage: CrashStage, record_property: Measure
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker(step_seconds=SLOW_SECONDS)
    victim = stage.leader()
    stage.scheduler()
    producer = stage.producer(jobs)
    stage.wait_for_tokens(3)
    victim.kill()

    failover(stage, victim, record_property, "SIGKILL")

    stage.expect_success(producer)
    stage.judge(jobs)


def test_scheduler_paused_past_its_lease_has_no_say_any_more(stage: CrashStage) -> None:
    jobs = plan_jobs(2 * NUM_JOBS)
    stage.worker()
    stale = stage.leader()
    stage.scheduler()
    stale.pause()
    early = stage.producer(jobs[:NUM_JOBS])
    stage.wait_for_epoch(2)
    stale.resume()
    late = stage.producer(jobs[NUM_JOBS:])

    stage.expect_success(early, late)

    stage.wait(lambda: "starts over" in stale.log, "the stale leader steps down")
    stage.judge(jobs)


def test_scheduler_is_killed_while_caches_change_and_the_next_one_knows_what_they_hold(
    stage: CrashStage, record_property: Measure
) -> None:
    # Each prompt has three routing hashes when the leader dies; with its output it has four.
    first = [
        PlannedJob(f"first-{number}", tuple(range(100 * number, 100 * number + 48)))
        for number in range(12)
    ]
    later = [
        PlannedJob(f"later-{number}", (*job.prompt, *job.oracle, 7), num_tokens=4)
        for number, job in enumerate(first)
    ]
    workers = [stage.worker(step_seconds=SLOW_SECONDS, knows_costs=True) for _ in range(2)]
    victim = stage.leader(lease_seconds=PATIENT_SECONDS)
    stage.scheduler(lease_seconds=PATIENT_SECONDS)
    producer = stage.producer(first)
    stage.wait_for_tokens(3, num_jobs=len(first))

    def rests(worker: Actor) -> bool:
        status = stage.status_of(worker)
        return not status.num_running and not status.num_waiting

    victim.kill()

    failover(stage, victim, record_property, "SIGKILL beside changing caches")
    stage.expect_success(producer)
    # One after the other, so that no load speaks for a worker, and not in turns.
    for job in (*later[::2], *later[1::2]):
        stage.wait(lambda: all(map(rests, workers)), "both workers have said that they rest")
        stage.expect_success(stage.producer([job]))

    ids = stage.judge([*first, *later])
    assert len({worker_of(stage, ids[job.key]) for job in first}) == 2
    # The last token of an output is chosen and not computed: 67 are, in blocks of four.
    num_home = sum(cached_tokens(stage, ids[job.key]) == 64 for job in later)
    # A scheduler that knows nothing gets so many right in one of fifty runs; one that knows may
    # still think once or twice that the other worker is sooner done.
    assert num_home >= 10, f"{num_home} of {len(later)}"


def worker_of(stage: CrashStage, job_id: str) -> bytes | None:
    """Return the id of the worker that ran a job last."""
    return stage.client.hget(KEYS.job(job_id), "w")


def cached_tokens(stage: CrashStage, job_id: str) -> int:
    """Return how many tokens of a job's prompt its worker did not have to compute."""
    stored = stage.client.hget(KEYS.job(job_id), "res")
    return decode(stored, JobResult).end.usage.cached_tokens
