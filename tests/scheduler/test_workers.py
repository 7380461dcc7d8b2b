"""The credit of one worker."""

from dataclasses import replace

import pytest

from support.waiting_jobs import make_job
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.fleet.workers import Worker


def make_worker(**values: object) -> Worker:
    defaults = {
        "worker_id": "a",
        "model": "m",
        "num_blocks": 100,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "wire_version": 1,
    }
    return Worker(WorkerInfo.model_validate(defaults | values), 0.0)


def test_a_job_reserved_again_is_charged_once() -> None:
    worker = make_worker()
    for command in ("1-0", "2-0", "3-0"):
        worker.reserve("j", 500)
        worker.sent("j", command)
    assert worker.outstanding_tokens == 500

    worker.update(WorkerStatus(last_command="3-0", num_running=1, free_blocks=90), 1.0)

    assert worker.outstanding_tokens == 0


def acknowledge(worker: Worker, seconds: float, step_seconds: float, number: int = 1) -> None:
    """Let one job be sent, and covered by a status so many seconds later."""
    at = 1000.0 * number
    worker.reserve("acknowledged", 1)
    worker.sent("acknowledged", f"{number}-0", at)
    status = WorkerStatus(last_command=f"{number}-0", step_seconds=step_seconds, free_blocks=90)
    worker.update(status, at + seconds)


def test_the_time_to_an_acknowledgement_is_measured_from_the_dispatch() -> None:
    worker = make_worker()
    assert worker.ack_seconds is None

    acknowledge(worker, 0.25, step_seconds=0.1)

    assert worker.ack_seconds == pytest.approx(0.25)


def test_a_status_that_covers_several_jobs_is_measured_from_the_first() -> None:
    worker = make_worker()
    for number, at in ((1, 5.0), (2, 6.0), (3, 7.0)):
        worker.reserve(f"j{number}", 1)
        worker.sent(f"j{number}", f"{number}-0", at)

    worker.update(WorkerStatus(last_command="2-0"), 8.0)

    assert worker.ack_seconds == pytest.approx(3.0)


def test_the_mean_follows_a_worker_that_becomes_slower() -> None:
    worker = make_worker()
    acknowledge(worker, 0.1, step_seconds=0.1)
    times = []
    for number in range(2, 40):
        acknowledge(worker, 0.5, step_seconds=0.1, number=number)
        times.append(worker.ack_seconds)

    assert times == sorted(times)
    assert times[-1] == pytest.approx(0.5, rel=0.01)


def test_dispatches_without_a_time_or_without_a_status_are_not_measured() -> None:
    worker = make_worker()
    worker.reserve("untimed", 1)
    worker.sent("untimed", "1-0")
    worker.reserve("uncovered", 1)
    worker.sent("uncovered", "2-0", 5.0)

    worker.update(WorkerStatus(last_command="1-0"), 9.0)

    assert worker.ack_seconds is None


@pytest.mark.parametrize(
    ("ack_seconds", "budgets"),
    [(0.0, 2), (0.05, 2), (0.1, 2), (0.14, 2), (0.201, 2), (0.21, 3), (0.3, 3), (9.0, 3)],
)
def test_the_credit_is_the_step_that_runs_and_those_until_a_dispatch_arrives_up_to_two(
    ack_seconds: float, budgets: int
) -> None:
    worker = make_worker(max_num_batched_tokens=1000)

    acknowledge(worker, ack_seconds, step_seconds=0.1)

    assert worker.credit == budgets * 1000


def test_before_anything_is_measured_the_credit_is_two_steps() -> None:
    worker = make_worker(max_num_batched_tokens=1000)
    assert worker.credit == 2000

    worker.update(WorkerStatus(step_seconds=0.1), 1.0)

    assert worker.credit == 2000


def make_busy(seconds: float) -> Worker:
    """A worker with steps of 0.1 s and 1,000 tokens that acknowledges after so many seconds."""
    worker = make_worker(max_num_batched_tokens=1000, num_blocks=1000)
    acknowledge(worker, seconds, step_seconds=0.1)
    worker.update(WorkerStatus(last_command="1-0", num_running=1, free_blocks=999), 2000.0)
    return worker


def fill(worker: Worker, tokens: int, *, is_urgent: bool = False) -> int:
    """Reserve jobs of so many tokens while they fit; returns how many."""
    number = 0
    while worker.fits(make_job(cost=tokens), tokens, is_urgent=is_urgent):
        worker.reserve(f"{tokens}-{is_urgent}-{number}", tokens, is_urgent=is_urgent)
        number += 1
    return number


@pytest.mark.parametrize(("seconds", "tokens"), [(0.1, 2000), (0.3, 3000)])
def test_a_worker_farther_away_gets_a_third_step_of_work_and_no_fourth(
    seconds: float, tokens: int
) -> None:
    worker = make_busy(seconds)

    assert 500 * fill(worker, 500) == tokens
    assert not worker.has_credit


def test_one_long_prompt_queues_ahead_where_less_than_a_step_is() -> None:
    worker = make_busy(0.1)
    worker.reserve("short", 999)
    assert fill(worker, 5000) == 1

    # It is not charged anew for what it has, but nothing joins it.
    assert worker.outstanding_tokens == 5999
    assert not worker.fits(make_job(cost=1), 1)


def test_behind_a_step_of_work_a_prompt_goes_only_within_the_credit() -> None:
    worker = make_busy(0.1)
    worker.reserve("a step", 1000)

    assert not worker.fits(make_job(cost=1001), 1001)
    assert worker.fits(make_job(cost=1000), 1000)


def test_only_urgent_tokens_are_in_the_way_of_urgent_jobs() -> None:
    worker = make_busy(0.1)
    assert fill(worker, 500) == 4
    assert worker.has_urgent_credit and not worker.has_credit

    assert fill(worker, 500, is_urgent=True) == 4
    assert not worker.has_urgent_credit
    assert (worker.outstanding_tokens, worker.urgent_tokens) == (4000, 2000)


def test_urgent_tokens_are_in_the_way_of_all_other_jobs() -> None:
    worker = make_busy(0.1)

    assert fill(worker, 500, is_urgent=True) == 4
    assert fill(worker, 500) == 0


def test_urgent_tokens_that_a_status_reports_count_towards_their_credit() -> None:
    worker = make_busy(0.1)
    computing = {"last_command": "1-0", "num_running": 1, "free_blocks": 999}
    worker.update(WorkerStatus(**computing, waiting_tokens=1900, urgent_tokens=1900), 3.0)
    assert not worker.fits(make_job(cost=500), 500, is_urgent=True)

    worker.update(WorkerStatus(**computing, waiting_tokens=1900, urgent_tokens=900), 4.0)
    assert worker.fits(make_job(cost=500), 500, is_urgent=True)
    assert not worker.fits(make_job(cost=500), 500)


def test_a_job_of_several_outputs_takes_as_many_slots_until_a_status_tells_of_it() -> None:
    worker = make_worker(max_num_seqs=16)
    eight = replace(make_job(cost=10), num_outputs=8)
    worker.reserve("one", 1)
    worker.sent("one", "1-0")
    assert worker.fits(eight, 10)

    worker.reserve("eight", 10, num_seqs=8)
    worker.sent("eight", "2-0")
    # An eighth more than its slots may wait there: 18 in all.
    assert worker.num_seqs == 9
    assert worker.fits(replace(eight, num_outputs=9), 10)
    assert not worker.fits(replace(eight, num_outputs=10), 10)

    worker.drop("one")
    assert worker.num_seqs == 8
    worker.update(WorkerStatus(last_command="2-0", num_running=8, free_blocks=90), 1.0)
    assert worker.num_seqs == 8


def test_a_job_of_more_outputs_than_there_are_slots_runs_alone() -> None:
    worker = make_worker(max_num_seqs=4)
    many = replace(make_job(cost=10), num_outputs=100)
    assert worker.fits(many, 10)
    worker.reserve("other", 1)
    assert not worker.fits(many, 10)
