"""The crash matrix: whoever dies, pauses or loses a reply, every job ends once and rightly.

Each test is a row, or a family of rows, of the table in docs/reliability.md.  The processes are
real ones; they die at named points, see ``crash.points``.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from crash import points
from support.actors import Actor
from support.crash_stage import CrashStage
from support.forwarder import Forwarder
from support.measured import MEASURED
from support.recorder import PlannedJob, Record, plan_jobs
from support.shard import KEYS
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.runtime import CRASH_STATUS

NUM_JOBS = 4
#: A step so slow that a worker can be caught in mid-generation.
SLOW_SECONDS = 0.03
POISON = 100

Measure = Callable[[str, object], None]


def test_every_crash_point_of_the_code_is_in_the_matrix() -> None:
    tested = {points.name_of(point) for point in points.ALL_POINTS}
    assert points.points_in_code() == tested


# --- Producers ---


@pytest.mark.parametrize("point", points.PRODUCER_POINTS)
def test_producer_dies_around_submit_and_finds_its_jobs_again(
    stage: CrashStage, point: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker()
    stage.expect_crash(stage.producer(jobs, crash_at=point))
    assert len(stage.job_ids()) == (NUM_JOBS if "after" in point else 0)

    stage.expect_success(stage.producer(jobs))

    stage.judge(jobs)
    [accepted] = [record.accepted for path in stage.records if (record := Record.load(path)).ends]
    assert {is_new for _, is_new in accepted.values()} == {"before" in point}


def test_producer_is_killed_in_mid_stream_and_follows_again(stage: CrashStage) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(step_seconds=SLOW_SECONDS)
    first = stage.producer(jobs)
    stage.wait_for_tokens(3, NUM_JOBS)
    first.kill()

    stage.expect_success(stage.producer(jobs))

    stage.judge(jobs)


# --- Schedulers ---


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


# --- Workers ---


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


# --- Replies that never arrive ---


@pytest.fixture
def forwarder(valkey_server: EmbeddedBroker) -> Iterator[Forwarder]:
    with Forwarder(str(valkey_server.settings.socket_path)) as forwarder:
        yield forwarder


@pytest.mark.parametrize("function", ["claim", "append", "finish", "beat"])
def test_a_lost_reply_to_a_worker_changes_nothing(
    stage: CrashStage, forwarder: Forwarder, function: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(url=forwarder.url)
    forwarder.lose_reply_to(f"_{function}".encode())

    stage.expect_success(stage.producer(jobs))

    stage.wait(lambda: forwarder.has_lost_reply, "a reply was lost")
    stage.judge(jobs)
    assert stage.fences() == {1}


@pytest.mark.parametrize("function", ["dispatch", "lead"])
def test_a_lost_reply_to_the_leader_changes_nothing(
    stage: CrashStage, forwarder: Forwarder, function: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    stage.leader(url=forwarder.url)
    forwarder.lose_reply_to(f"_{function}".encode())

    stage.expect_success(stage.producer(jobs))

    stage.wait(lambda: forwarder.has_lost_reply, "a reply was lost")
    stage.judge(jobs)
    assert stage.fences() == {1}


def test_a_lost_reply_to_submit_makes_no_second_job(
    stage: CrashStage, forwarder: Forwarder
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker()
    forwarder.lose_reply_to(b"_submit")

    stage.expect_success(stage.producer(jobs, url=forwarder.url))

    assert forwarder.has_lost_reply
    stage.judge(jobs)


# --- The back door ---


def test_consumer_of_ended_jobs_dies_before_it_acknowledges_and_reads_again(
    stage: CrashStage, redis_client: redis.Redis, tmp_path: Path
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    redis_client.hset(KEYS.settings, "back:*", 1000)
    stage.leader()
    stage.worker()
    stage.expect_success(stage.producer(jobs))
    out = KEYS.back_door("default")
    delivered = tmp_path / "delivered"
    first = stage.consumer(out, delivered, crash_at="test.before_ack:2")
    stage.expect_crash(first)

    second = stage.consumer(out, delivered)

    assert second.wait() == 0, stage.logs()
    ids = set(stage.judge(jobs).values())
    told = delivered.read_text().split()
    assert set(told) == ids
    assert len(told) == len(ids) + 1, "only what was not acknowledged comes again"
    assert redis_client.xpending(out, "tests")["pending"] == 0
    assert redis_client.xlen(out) == len(ids), "one entry per ended job"
