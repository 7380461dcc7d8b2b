"""Jobs of lower classes go out although higher ones keep coming; time is the test's own."""

import gc
import random
import time
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting_jobs import make_job
from tidemill.protocol.messages import WorkerInfo
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.ageing import Ageing
from tidemill_scheduler.policy.fleet import Fleet
from tidemill_scheduler.policy.lanes import MAX_PASSED, Lanes
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.settings import PolicySettings

AGE_SECONDS = 10.0


def job_at(
    since: float, priority: int, path: tuple[int, ...] = (), attempts: int = 0
) -> WaitingJob:
    job = make_job(path, priority=priority, attempts=attempts, cost=1)
    return replace(job, since=since)


WORKER = WorkerInfo(
    worker_id="w",
    model="m",
    num_blocks=1000,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    wire_version=1,
)
#: All but the interactive class is put in prefix order, and turns of a class last for long.
SETTINGS = PolicySettings(scan_seconds=(float("inf"), 0.0, 0.0), class_quantum=100_000)


class Mill:
    """Lanes whose one worker takes a job each time it is asked."""

    def __init__(self) -> None:
        self.waiting: dict[str, WaitingJob] = {}
        fleet, residency = Fleet(), Residency(64)
        fleet.add(Worker(WORKER, 0.0))
        residency.add_worker("w", 250)
        self.lanes = Lanes(
            self.waiting,
            fleet,
            residency,
            64,
            SETTINGS,
            age_seconds=AGE_SECONDS,
            weight_of=lambda tenant: 1.0,
        )

    def add(self, *jobs: WaitingJob) -> None:
        for job in jobs:
            self.waiting[job.job_id] = job
            self.lanes.add(job, job.since)

    def take(self, now: float) -> WaitingJob:
        job = self.lanes.next_for("w", now, lambda owner: True)
        assert job is not None
        self.lanes.take(job, "w", 1.0, now)
        del self.waiting[job.job_id]
        return job

    def priorities(self, num: int, now: float) -> list[int]:
        return [self.take(now).priority for _ in range(num)]


def test_a_young_job_waits_for_all_of_higher_classes() -> None:
    mill = Mill()
    mill.add(job_at(0.0, 5), *(job_at(0.0, -1) for _ in range(20)))

    assert mill.priorities(21, AGE_SECONDS - 0.1) == [-1] * 20 + [5]


@pytest.mark.parametrize(
    ("waited", "own", "higher", "rises"),
    [
        (1.0, 0, -1, True),
        (1.0, 5, 0, True),
        (1.9, 5, -1, False),
        (2.0, 5, -1, True),
        (1.0, 7, 5, True),
        (9.0, -1, -5, True),
    ],
)
def test_a_job_rises_one_class_for_each_ageing_time(
    waited: float, own: int, higher: int, rises: bool
) -> None:
    mill, now = Mill(), waited * AGE_SECONDS
    mill.add(job_at(0.0, own), *(job_at(now, higher) for _ in range(2 * MAX_PASSED)))

    taken = mill.priorities(MAX_PASSED + 1, now)

    assert taken == [higher] * MAX_PASSED + [own if rises else higher]


def test_a_backlog_that_has_risen_leaves_most_turns_to_the_class_above() -> None:
    mill = Mill()
    mill.add(*(job_at(0.0, 1) for _ in range(1000)))
    mill.add(*(job_at(100.0, -1) for _ in range(70)))

    taken = mill.priorities(80, 100.0)

    assert taken.count(-1) == 70


def test_old_jobs_of_the_class_that_is_served_hold_back_none_that_rose() -> None:
    mill = Mill()
    mill.add(*(job_at(0.0, priority) for priority in (-1, 0, 1) for _ in range(100)))

    taken = mill.priorities(80, 100.0)

    assert taken.count(-1) == 70


def test_requeued_jobs_go_before_those_that_rose() -> None:
    mill = Mill()
    mill.add(*(job_at(100.0, -1) for _ in range(MAX_PASSED)), job_at(0.0, 5))
    mill.priorities(MAX_PASSED, 100.0)
    mill.add(job_at(100.0, -1), job_at(100.0, 9, attempts=1))

    assert mill.priorities(3, 100.0) == [9, 5, -1]


def test_the_order_by_prefix_holds_among_jobs_that_rose() -> None:
    mill = Mill()
    paths = [(3, 1), (1, 1), (2, 1), (3, 2), (1, 2), (2, 2)]
    mill.add(*(job_at(0.0, 1, path) for path in paths))
    mill.add(*(job_at(100.0, -1) for _ in range(100)))

    risen = [job for _ in range(60) if (job := mill.take(100.0)).priority == 1]

    assert len(risen) == len(paths)
    assert [job.key for job in risen] == sorted(job.key for job in risen)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 30), st.sampled_from([-9, -3, 0, 1, 50])), min_size=1, max_size=30
    ),
    rate=st.integers(1, 20),
    surplus=st.integers(0, 3),
)
def test_every_job_goes_out_in_time_however_many_of_the_highest_class_come(
    jobs: list[tuple[float, int]], rate: int, surplus: int
) -> None:
    """``rate`` jobs go out in a second, more of the highest priority come in."""
    mill, now = Mill(), 30.0
    victims = [job_at(since, priority) for since, priority in sorted(jobs)]
    mill.add(*victims)
    waiting = {job.job_id for job in victims}
    # Twice the ageing time for the last that came; then each turn of those that rose is one of
    # theirs, for nobody else is older.
    bound = now + 2 * AGE_SECONDS + (MAX_PASSED + 1) * len(victims) / rate + 1

    while waiting:
        mill.add(*(job_at(now, -10) for _ in range(rate + surplus)))
        for turn in range(rate):
            waiting.discard(mill.take(now + turn / rate).job_id)
        now += 1
        assert now <= bound + 1


def num_jobs_in_memory() -> int:
    """Jobs that anything holds on to; what nothing does is collected first."""
    gc.collect()
    # Not isinstance: it asks strange objects for their class, and some warn of that.
    return sum(type(item) is WaitingJob for item in gc.get_objects())


def test_few_jobs_that_have_left_are_remembered_while_one_waits_before_them() -> None:
    others_jobs = num_jobs_in_memory()
    waiting = {job.job_id: job for job in (job_at(0.0, 1) for _ in range(5_000))}
    ageing = Ageing(waiting, AGE_SECONDS)
    for job in waiting.values():
        ageing.add(job)
    oldest, *others = waiting
    leavers = deque(others)

    for _ in range(2 * len(waiting)):
        newcomer = job_at(1.0, 1)
        waiting[newcomer.job_id] = newcomer
        ageing.add(newcomer)
        leavers.append(newcomer.job_id)
        del waiting[leavers.popleft()]

    reachable = num_jobs_in_memory() - others_jobs
    assert ageing.risen(0, AGE_SECONDS) is waiting[oldest]
    assert reachable < 1.5 * len(waiting)


def test_few_jobs_that_have_left_are_remembered_in_whatever_order_they_leave() -> None:
    # Other tests may have left some.
    others_jobs = num_jobs_in_memory()
    waiting = {job.job_id: job for job in (job_at(0.0, 1) for _ in range(500))}
    ageing = Ageing(waiting, AGE_SECONDS)
    for job in waiting.values():
        ageing.add(job)
    oldest, *others = waiting
    random_ = random.Random(1)

    for _ in range(20 * len(waiting)):
        newcomer = job_at(1.0, 1)
        waiting[newcomer.job_id] = newcomer
        ageing.add(newcomer)
        others.append(newcomer.job_id)
        index = random_.randrange(len(others))
        others[index], others[-1] = others[-1], others[index]
        del waiting[others.pop()]

    reachable = num_jobs_in_memory() - others_jobs
    assert ageing.risen(0, AGE_SECONDS) is waiting[oldest]
    assert reachable < 1.5 * len(waiting)


def test_a_job_whose_pointer_was_replaced_is_not_as_old_as_the_first_one() -> None:
    old = job_at(0.0, 1)
    new = replace(old, since=0.5 * AGE_SECONDS)
    # Enough of others that nobody looks for what has left.
    later = [job_at(AGE_SECONDS, 1) for _ in range(10)]
    waiting = {job.job_id: job for job in (old, *later)}
    ageing = Ageing(waiting, AGE_SECONDS)
    for job in waiting.values():
        ageing.add(job)
    waiting[new.job_id] = new
    ageing.add(new)

    assert ageing.risen(0, 1.2 * AGE_SECONDS) is None


@pytest.mark.slow
def test_ageing_costs_little_for_a_million_jobs() -> None:
    """Prints what a job costs among few and among many; the ratio tells whether it scales."""

    def microseconds_per_job(num: int) -> float:
        mill = Mill()
        jobs = [job_at(0.0, number % 3 - 1) for number in range(num)]
        mill.add(*jobs)
        started = time.process_time()
        for _ in range(10_000):
            mill.take(100.0)
        return (time.process_time() - started) * 100

    few, many = microseconds_per_job(20_000), microseconds_per_job(200_000)

    print(f"take: {few:.0f} us of 20,000 jobs, {many:.0f} us of 200,000")
    assert many < 10 * few + 100
