"""Estimates of waiting times against the shares that jobs really get."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.protocol.calls import Backlog
from tidemill_scheduler.policy.fair_share import DeficitRoundRobin
from tidemill_scheduler.policy.waiting_times import at_pace, waiting_seconds

CLASS_WEIGHTS = (8.0, 4.0, 1.0)
JOB_TOKENS = 10
RATE = 100.0

#: Waiting jobs of each tenant, a list for each class.
Queues = list[list[int]]

queues = st.lists(st.lists(st.integers(1, 40), max_size=5), min_size=3, max_size=3)


def backlog_of(queues: Queues, rate: float = RATE) -> Backlog:
    work = [float(sum(jobs) * JOB_TOKENS) for jobs in queues]
    return Backlog(
        work_by_class=(work[0], work[1], work[2]),
        num_tenants_by_class=(len(queues[0]), len(queues[1]), len(queues[2])),
        tokens_per_second=rate,
        num_jobs_by_class=(sum(queues[0]), sum(queues[1]), sum(queues[2])),
        class_weights=CLASS_WEIGHTS,
    )


def run_until_served(queues: Queues, priority_class: int, tenant: int) -> float:
    """Share one worker as classes, then as tenants; return when a tenant's last job went out."""
    classes = DeficitRoundRobin[int, int](JOB_TOKENS)
    lanes = [DeficitRoundRobin[int, int](JOB_TOKENS) for _ in queues]
    left = [Counter(dict(enumerate(jobs))) for jobs in queues]
    for number, lane in enumerate(lanes):
        if queues[number]:
            classes.activate(number, CLASS_WEIGHTS[number])
        for name in left[number]:
            lane.activate(name)
    served = 0.0
    while left[priority_class][tenant]:
        chosen = classes.turn(0)
        assert chosen is not None
        owner = lanes[chosen].turn(0)
        assert owner is not None
        classes.charge(0, chosen, JOB_TOKENS)
        lanes[chosen].charge(0, owner, JOB_TOKENS)
        served += JOB_TOKENS
        left[chosen][owner] -= 1
        if not left[chosen][owner]:
            lanes[chosen].deactivate(owner)
        if not len(lanes[chosen]):
            classes.deactivate(chosen)
    return served / RATE


@settings(max_examples=200, deadline=None)
@given(num_jobs=st.integers(1, 40), num_tenants=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_among_equal_tenants_the_estimate_is_what_the_shares_give(
    num_jobs: int, num_tenants: list[int]
) -> None:
    queues = [[num_jobs] * number for number in num_tenants]
    for priority_class in (number for number in range(3) if num_tenants[number]):
        estimate = waiting_seconds(backlog_of(queues), priority_class, num_jobs)
        assert estimate is not None
        seconds = run_until_served(queues, priority_class, num_tenants[priority_class] - 1)
        # A round of all classes and tenants is the grain of the shares.
        grain = JOB_TOKENS * (sum(CLASS_WEIGHTS) + sum(num_tenants)) / RATE
        assert seconds == pytest.approx(estimate, abs=grain)


def test_classes_with_less_work_leave_their_share_to_the_others() -> None:
    backlog = Backlog((80.0, 4_000.0, 1_000.0), (1, 1, 1), RATE, (8, 400, 100))
    # All of p0, all of p1 and a quarter as much of p2.
    assert waiting_seconds(backlog, 1, 400) == pytest.approx((80 + 4_000 + 1_000) / RATE)
    # 100 jobs of p1 take 25 of p2 along.
    assert waiting_seconds(backlog, 1, 100) == pytest.approx((80 + 1_000 + 250) / RATE)


def test_a_tenant_with_nothing_that_waits_is_next() -> None:
    assert waiting_seconds(backlog_of([[], [40, 40], []]), 1, 0) == 0.0


def test_a_heavier_tenant_waits_less() -> None:
    backlog = backlog_of([[], [40, 40, 40], []])
    seconds = [waiting_seconds(backlog, 1, 40, weight) for weight in (0.5, 1.0, 2.0, 100.0)]
    assert seconds == [12.0, 12.0, 8.0, pytest.approx(4.08)]


def test_without_a_rate_there_is_no_estimate() -> None:
    assert waiting_seconds(backlog_of([[], [40], []], rate=0.0), 1, 40) is None


def test_a_measured_pace_goes_before_a_rate_that_was_worked_out() -> None:
    backlog = backlog_of([[], [30], [10]])
    # Forty jobs, four a second.
    assert waiting_seconds(at_pace(backlog, 4.0), 2, 10) == pytest.approx(10.0)
    assert at_pace(backlog, 0.0) == backlog


def test_jobs_are_not_computed_faster_than_the_workers_can() -> None:
    backlog = backlog_of([[], [30], [10]])
    # A thousand small jobs a second went before; these are 400 tokens at 100 a second.
    assert waiting_seconds(at_pace(backlog, 1_000.0), 2, 10) == pytest.approx(4.0)


def test_a_pace_without_workers_is_no_rate() -> None:
    assert waiting_seconds(at_pace(backlog_of([[], [5], []], rate=0.0), 4.0), 1, 5) is None


def test_a_burst_on_an_idle_shard_waits_as_long_as_the_pace_of_earlier_jobs_tells() -> None:
    idle = at_pace(backlog_of([[], [], []], rate=10_000.0), 0.5, mean_tokens=200.0)
    seconds = waiting_seconds(idle, 2, 600, mean_tokens=200.0)
    assert seconds == pytest.approx(1_200.0)
    # Twice as large, twice as long.
    assert waiting_seconds(idle, 2, 600, mean_tokens=401.0) == pytest.approx(2_400.0)


def test_a_burst_without_a_pace_takes_at_least_what_the_steps_take() -> None:
    idle = backlog_of([[], [], []])
    assert waiting_seconds(idle, 2, 600, cost=49, mean_tokens=49.0) == pytest.approx(300.49)


def test_jobs_of_a_class_that_had_none_are_taken_for_those_of_the_others() -> None:
    # Five of p2, and all of p0 and p1 as their shares are larger.
    assert waiting_seconds(backlog_of([[4], [6], []]), 2, 5) == pytest.approx(1.5)


def test_more_jobs_than_were_told_of_count_all_the_same() -> None:
    assert waiting_seconds(backlog_of([[], [], [10]]), 2, 600) == pytest.approx(60.0)


def test_the_prompt_of_the_job_itself_counts() -> None:
    assert waiting_seconds(backlog_of([[], [], []]), 2, 0, cost=500) == pytest.approx(5.0)


def test_an_empty_backlog_is_no_wait() -> None:
    assert waiting_seconds(backlog_of([[], [], []]), 2, 0) == 0.0


@given(
    queues=queues,
    priority_class=st.integers(0, 2),
    own=st.integers(0, 50),
    more=st.integers(1, 30),
    grown=st.integers(0, 2),
)
def test_the_estimate_grows_with_the_backlog(
    queues: Queues, priority_class: int, own: int, more: int, grown: int
) -> None:
    before = waiting_seconds(backlog_of(queues), priority_class, own)
    larger = [deque(jobs) for jobs in queues]
    larger[grown].append(more)
    after = waiting_seconds(backlog_of([list(jobs) for jobs in larger]), priority_class, own)
    assert before is not None
    assert after is not None
    assert after >= before - 1e-9
    with_more_of_its_own = waiting_seconds(backlog_of(queues), priority_class, own + more)
    assert with_more_of_its_own is not None
    assert with_more_of_its_own >= before - 1e-9


@given(queues=queues, priority_class=st.integers(0, 2), own=st.integers(0, 50))
def test_nobody_waits_for_more_than_there_is(queues: Queues, priority_class: int, own: int) -> None:
    backlog = backlog_of(queues)
    seconds = waiting_seconds(backlog, priority_class, own)
    assert seconds is not None
    # What was told, and at most all of the tenant's own beyond it.
    most = sum(backlog.work_by_class) + own * JOB_TOKENS
    assert 0 <= seconds <= most / RATE + 1e-9
