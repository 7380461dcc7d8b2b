"""Jobs that may be killing their workers are tried alone."""

from support.waiting_jobs import make_job
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.fleet.quarantine import SUSPECT_CRASHES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import Scheduler


def make_scheduler(*names: str) -> Scheduler:
    scheduler = Scheduler(silent_seconds=100.0)
    for name in names:
        add_worker(scheduler, name)
    return scheduler


def add_worker(scheduler: Scheduler, name: str) -> None:
    info = WorkerInfo(
        worker_id=name,
        model="m",
        num_blocks=1000,
        max_num_seqs=16,
        max_num_batched_tokens=1000,
        wire_version=1,
    )
    scheduler.add_worker(info, 0.0)


def add_jobs(scheduler: Scheduler, num: int, crashes: int = 0) -> list[str]:
    jobs = [make_job(attempts=crashes) for _ in range(num)]
    for job in jobs:
        suspect = WaitingJob(
            job.job_id, job.queue, job.entry_id, "m", cost=10, attempts=crashes, crashes=crashes
        )
        scheduler.add_job(suspect)
    return [job.job_id for job in jobs]


def tick(scheduler: Scheduler, command: str = "1-0") -> list[Dispatch]:
    """Tick and report every dispatch as sent."""
    dispatches = scheduler.tick(0.0)
    for dispatch in dispatches:
        scheduler.sent(dispatch, command)
    return dispatches


def report(
    scheduler: Scheduler, name: str, num_waiting: int = 0, now: float = 0.0, **status: object
) -> None:
    values = {"last_command": "9-0", "free_blocks": 900, "num_waiting": num_waiting, **status}
    scheduler.update_worker(name, WorkerStatus.model_validate(values), now)


def test_one_suspect_at_a_time_is_tried_and_others_go_elsewhere() -> None:
    scheduler = make_scheduler("a", "b")
    first, second = add_jobs(scheduler, 2, SUSPECT_CRASHES)
    others = add_jobs(scheduler, 5)

    dispatches = tick(scheduler)

    [trial] = [d for d in dispatches if d.job.job_id in (first, second)]
    elsewhere = {d.worker_id for d in dispatches if d.job.job_id in others}
    assert len(dispatches) == 6
    assert elsewhere == {"a", "b"} - {trial.worker_id}


def test_a_job_that_crashed_once_is_no_suspect() -> None:
    scheduler = make_scheduler("a")
    add_jobs(scheduler, 3, SUSPECT_CRASHES - 1)

    assert len(tick(scheduler)) == 3


def test_the_next_suspect_comes_once_the_one_before_has_produced_a_token() -> None:
    scheduler = make_scheduler("a")
    first, second = add_jobs(scheduler, 2, SUSPECT_CRASHES)
    [other] = add_jobs(scheduler, 1)
    assert [d.job.job_id for d in tick(scheduler)] == [first]

    report(scheduler, "a", num_waiting=1, waiting_tokens=10)
    assert tick(scheduler) == []
    report(scheduler, "a", num_running=1)
    assert tick(scheduler) == []
    report(scheduler, "a", num_running=1)
    assert [d.job.job_id for d in tick(scheduler, "9-1")] == [second]
    for _ in range(2):
        report(scheduler, "a", num_running=2, last_command="9-1")
    assert [d.job.job_id for d in tick(scheduler, "9-2")] == [other]


def test_the_ward_is_emptied_of_waiting_prompts_first() -> None:
    scheduler = make_scheduler("a")
    report(scheduler, "a", num_waiting=2, waiting_tokens=50)
    [suspect] = add_jobs(scheduler, 1, SUSPECT_CRASHES)
    add_jobs(scheduler, 3)
    assert tick(scheduler) == []

    report(scheduler, "a")

    assert [d.job.job_id for d in tick(scheduler)] == [suspect]


def test_the_ward_is_a_worker_heard_of_lately() -> None:
    scheduler = make_scheduler("a", "b", "c")
    for name, num_running in (("b", 3), ("c", 2)):
        for _ in range(2):
            report(scheduler, name, now=60.0, num_running=num_running)
    [suspect] = add_jobs(scheduler, 1, SUSPECT_CRASHES)

    assert [(d.job.job_id, d.worker_id) for d in scheduler.tick(60.0)] == [(suspect, "c")]


def test_the_death_of_the_ward_ends_the_trial() -> None:
    scheduler = make_scheduler("a")
    _, second = add_jobs(scheduler, 2, SUSPECT_CRASHES)
    tick(scheduler)

    scheduler.remove_worker("a")
    assert tick(scheduler) == []
    add_worker(scheduler, "b")

    assert [d.job.job_id for d in tick(scheduler)] == [second]


def test_a_suspect_can_be_taken_out() -> None:
    scheduler = make_scheduler()
    [suspect] = add_jobs(scheduler, 1, SUSPECT_CRASHES)
    scheduler.remove_job(suspect)
    add_worker(scheduler, "a")

    assert tick(scheduler) == []
    assert scheduler.num_waiting == 0
