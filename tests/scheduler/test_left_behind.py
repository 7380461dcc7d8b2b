"""Jobs that nobody would come for, and memory that nobody would free."""

from support.played_shard import PlayedShard, make_info
from support.waiting_jobs import make_job
from tidemill.protocol.messages import FinishedSequence
from tidemill_scheduler.policy.accounts import Accounts
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings

#: Everything but the interactive class is put in prefix order.
IN_ORDER = PolicySettings(scan_seconds=(float("inf"), 0.0, 0.0))


def test_groups_are_not_kept_for_a_worker_that_drains() -> None:
    shard = PlayedShard(Scheduler(silent_seconds=1e9, settings=IN_ORDER))
    draining, other = shard.join(), shard.join()
    draining.is_draining = True
    shard.tell(draining)
    for group in range(2):
        for number in range(4):
            path = (group, *range(400), number)
            shard.add(make_job(path, cost=64 * 402, priority=1))

    for _ in range(20):
        shard.now += 0.5
        shard.tell(draining)
        shard.tick()
        shard.finish_all(other)

    assert not shard.waiting


def test_an_interactive_job_leaves_a_worker_without_a_slot_for_one_that_idles() -> None:
    shard = PlayedShard(Scheduler(silent_seconds=1e9))
    full = shard.join(tells_cache=True, max_num_seqs=8)
    path = tuple(range(100))
    for number in range(9):
        shard.add(make_job((*path, number), cost=6500, priority=-1))
    for _ in range(9):
        shard.tick()
        shard.read(full)
        shard.compute(full, 9)
        shard.tell(full)
    idle = shard.join(tells_cache=True, max_num_seqs=8)
    shard.add(make_job((*path, 77), cost=6500, priority=-1))

    shard.now += 1.0
    shard.tell(full)
    shard.tick()

    assert (len(full.held), len(idle.held)) == (9, 1)


def test_a_job_that_was_set_aside_is_no_reason_to_look_for_its_priority() -> None:
    scheduler = Scheduler(silent_seconds=1e9, age_seconds=1.0)
    scheduler.add_worker(make_info("w", num_blocks=10), 0.0)
    scheduler.add_job(make_job(cost=10_000, priority=7))
    scheduler.tick(0.0)
    for priority in range(50, 100):
        scheduler.add_job(make_job(cost=10, priority=priority))

    given = [d for second in range(100, 200) for d in scheduler.tick(float(second))]

    assert given


def test_models_without_workers_and_jobs_are_forgotten() -> None:
    scheduler = Scheduler(silent_seconds=1e9)
    for number in range(50):
        name = f"model-{number}"
        scheduler.add_worker(make_info(f"w{number}", model=name), 0.0)
        job = make_job(model=name)
        scheduler.add_job(job)
        scheduler.forget(job.job_id)
        scheduler.remove_worker(f"w{number}")

    assert not scheduler._desks


def test_jobs_that_left_are_forgotten_although_an_older_one_of_their_class_waits() -> None:
    scheduler = Scheduler(silent_seconds=1e9)
    scheduler.add_worker(make_info("w", model="other"), 0.0)
    scheduler.add_job(make_job(priority=1))
    for _ in range(5000):
        job = make_job(priority=1)
        scheduler.add_job(job)
        scheduler.forget(job.job_id)

    [desk] = [desk for model, desk in scheduler._desks.items() if model == "m"]
    lines = desk.lanes._ageing._classes
    assert sum(len(line._swept) + len(line._unswept) for line in lines) < 2000


def test_a_thousand_priorities_hold_lanes_for_a_few() -> None:
    scheduler = Scheduler(silent_seconds=1e9)
    for number in range(8):
        scheduler.add_worker(make_info(f"w{number}", max_num_seqs=1), 0.0)
    for priority in range(-1000, 0):
        scheduler.add_job(make_job((priority + 2000,), priority=priority))

    lines = scheduler._desks["m"].lanes._lines.values()

    assert sum(len(line._interactive) > 0 for line in lines) <= 32
    assert scheduler.tick(0.0)


def test_a_tenant_is_charged_for_the_prompt_that_the_worker_counted() -> None:
    accounts, job = Accounts(output_weight=4), make_job(cost=1)
    told = FinishedSequence(
        job_id=job.job_id, prompt_tokens=5000, cached_tokens=1000, output_tokens=10
    )

    assert accounts.cost(job, told) == 4000 + 4 * 10
    assert accounts.cost(job, FinishedSequence(job_id=job.job_id, output_tokens=10)) == 1 + 4 * 10


def test_a_group_whose_worker_takes_nothing_for_seconds_is_split_for_one_that_idles() -> None:
    shard = PlayedShard(Scheduler(silent_seconds=1e9, settings=IN_ORDER))
    full, idle = shard.join(max_num_seqs=4), shard.join(max_num_seqs=4)
    for number in range(12):
        shard.add(make_job((*range(300), number), cost=64 * 301, priority=1))

    for _ in range(60):
        shard.now += 0.5
        shard.tick()
        for worker in (full, idle):
            shard.read(worker)
            shard.compute(worker, 9)
        shard.tell(full)
        shard.finish_all(idle)

    assert not shard.waiting
    assert not shard.scheduler.is_runnable(shard.now)
