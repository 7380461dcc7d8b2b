"""The credit of one worker."""

import pytest

from support.waiting_jobs import make_job
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.workers import Worker


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
    ("ack_seconds", "budgets"), [(0.0, 1), (0.05, 1), (0.1, 1), (0.14, 1), (0.21, 2), (9.0, 2)]
)
def test_the_credit_covers_the_steps_of_a_round_trip_up_to_two(
    ack_seconds: float, budgets: int
) -> None:
    worker = make_worker(max_num_batched_tokens=1000)

    acknowledge(worker, ack_seconds, step_seconds=0.1)

    assert worker.credit == budgets * 1000


def test_before_anything_is_measured_the_credit_is_one_step() -> None:
    worker = make_worker(max_num_batched_tokens=1000)
    assert worker.credit == 1000

    worker.update(WorkerStatus(step_seconds=0.1), 1.0)

    assert worker.credit == 1000


def test_a_worker_a_round_trip_away_gets_a_second_step_of_work_and_no_third() -> None:
    worker = make_worker(max_num_batched_tokens=1000, num_blocks=1000)
    near = make_worker(max_num_batched_tokens=1000, num_blocks=1000)
    acknowledge(worker, 0.3, step_seconds=0.1)
    acknowledge(near, 0.1, step_seconds=0.1)
    job = make_job(cost=500)
    held = {}
    for subject in (worker, near):
        subject.update(WorkerStatus(last_command="1-0", num_running=1, free_blocks=999), 2000.0)
        held[subject] = 0
        while subject.fits(job, 500):
            subject.reserve(f"job-{held[subject]}", 500)
            held[subject] += 1

    assert (held[worker], held[near]) == (4, 2)
