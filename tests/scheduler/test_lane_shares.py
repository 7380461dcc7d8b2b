"""Who comes first where lanes, classes and accounts meet."""

from collections import Counter
from dataclasses import replace

import pytest

from support.played_shard import PlayedShard
from support.waiting_jobs import make_job
from tidemill.protocol.messages import FinishedSequence, WorkerStatus
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings


def make_shard(**values: object) -> PlayedShard:
    settings = PolicySettings(**values)  # type: ignore[arg-type]
    return PlayedShard(Scheduler(silent_seconds=1e9, settings=settings))


@pytest.mark.parametrize("priority", [0, 1])
def test_jobs_in_prefix_order_are_not_passed_by_ones_of_their_tenant_that_come_later(
    priority: int,
) -> None:
    """A backlog is put in order; while it shrinks, jobs keep coming that could be bound at once."""
    shard = make_shard(max_bound=(float("inf"), 20.0, 20.0), scan_seconds=(1e9, 1e9, 1e9))
    worker = shard.join(max_num_seqs=4)
    backlog = [make_job((number,), cost=200, priority=priority) for number in range(60)]
    for job in backlog:
        shard.add(job)
    assert shard.tick()

    for number in range(60):
        while len(shard.waiting) < 20:
            shard.add(make_job((100 + number,), cost=1, priority=priority))
        shard.finish_all(worker)
        shard.tick()

    assert not [job for job in backlog if job.job_id in shard.waiting]


@pytest.mark.parametrize("rank", [1, 2])
def test_interactive_jobs_that_never_end_leave_the_other_classes_their_shares(rank: int) -> None:
    """The worker computes a quarter of its credit between two statuses."""
    shard = make_shard(urgent_seconds=0.1)
    worker = shard.join(max_num_batched_tokens=1000)
    given = [0, 0, 0]
    waiting_tokens, num_commands = 0, 0
    for _ in range(2000):
        for priority in (-1, rank - 1):
            while sum(job.priority == priority for job in shard.waiting.values()) < 20:
                job = make_job((len(given) + num_commands,), cost=250, priority=priority)
                shard.add(job)
                num_commands += 1
        for dispatch in shard.tick():
            given[dispatch.job.priority_class] += dispatch.tokens
            waiting_tokens += dispatch.tokens
        worker.unread = []
        waiting_tokens = max(0, waiting_tokens - 250)
        status = WorkerStatus(
            last_command=f"1-{sum(shard.num_given.values())}",
            num_running=3,
            waiting_tokens=waiting_tokens,
            free_blocks=90_000,
        )
        shard.scheduler.update_worker(worker.info.worker_id, status, shard.now)

    weights = PolicySettings().class_weights
    assert given[0] / given[rank] == pytest.approx(weights[0] / weights[rank], rel=0.1)


def test_corrections_of_jobs_that_were_not_charged_change_no_account() -> None:
    """A tenant that was alone owes nothing when another comes, however long its answers were."""
    shard = make_shard(scan_seconds=(float("inf"), 0.0, 0.0))
    worker = shard.join(max_num_seqs=1)
    for number in range(50):
        shard.add(make_job((number,), cost=64, priority=1))
    for _ in range(10):
        ended = [
            FinishedSequence(job_id=dispatch.job.job_id, output_tokens=100_000)
            for dispatch in shard.tick()
        ]
        shard.read(worker)
        worker.waiting, worker.finished = [], ended
        shard.tell(worker)

    assert len(shard.waiting) == 50 - 20
    others = [make_job((number,), cost=64, priority=1) for number in range(50)]
    for job in others:
        shard.add(replace(job, queue="p2:other"))
    served = set()
    for _ in range(15):
        served |= {dispatch.job.tenant for dispatch in shard.tick()}
        shard.finish_all(worker)

    assert served == {"default", "other"}


def test_a_job_of_a_new_priority_does_not_wait_for_a_worker_that_drains() -> None:
    shard = make_shard()
    draining = shard.join(num_blocks=50)
    draining.is_draining = True
    shard.tell(draining)
    full = shard.join(num_blocks=50)
    for job in (make_job(cost=600, priority=-2), make_job(cost=900, priority=-3)):
        shard.add(job)

    shard.tick()
    shard.finish_all(full)
    shard.join(num_blocks=100)
    shard.tick()

    assert not shard.waiting


def test_a_tenant_whose_prompts_were_cached_after_all_gets_more_jobs_than_another() -> None:
    shard = make_shard(scan_seconds=(float("inf"), 0.0, 0.0), tenant_quantum=512)
    worker = shard.join(max_num_seqs=1)
    served = Counter[str]()
    for number in range(200):
        job = make_job((number,), cost=500, priority=1)
        shard.add(replace(job, queue=f"p2:{'cached' if number % 2 else 'new'}", max_tokens=1))
    while served.total() < 60:
        given = shard.tick()
        served.update(dispatch.job.tenant for dispatch in given)
        shard.read(worker)
        worker.waiting = []
        worker.finished = [
            FinishedSequence(
                job_id=dispatch.job.job_id,
                cached_tokens=499 if dispatch.job.tenant == "cached" else 0,
                output_tokens=1,
            )
            for dispatch in given
        ]
        shard.tell(worker)

    assert served["cached"] > 1.5 * served["new"]


def test_a_worker_that_found_nothing_is_asked_again_as_soon_as_a_job_comes() -> None:
    shard = make_shard(scan_seconds=(float("inf"), 0.0, 0.0))
    shard.join()
    assert shard.tick() == []
    for priority in (-1, 0, 1):
        shard.add(make_job(priority=priority))
        assert len(shard.tick()) == 1
        assert shard.tick() == []


def test_what_was_not_worth_taking_from_a_worker_is_taken_over_when_it_dies() -> None:
    shard = make_shard(scan_seconds=(float("inf"), 0.0, 0.0))
    workers = [shard.join(max_num_seqs=1, max_num_batched_tokens=128) for _ in range(2)]
    for _ in range(2):
        shard.add(make_job((1, 1, 1, 1, 1), cost=321))
    shard.tick()
    assert len(shard.waiting) == 1, "its prefix is more than what is left of it"

    [leader] = [worker for worker in workers if worker.held]
    shard.die(leader)
    for _ in range(2):
        for worker in shard.workers.values():
            shard.finish_all(worker)
        shard.tick()

    assert not shard.waiting


def test_a_tenant_that_fell_behind_gets_its_group_split_although_its_prefix_costs_more() -> None:
    shard = make_shard(scan_seconds=(float("inf"), 0.0, 0.0), tenant_quantum=256)
    for _ in range(2):
        shard.join(max_num_seqs=8, max_num_batched_tokens=256)
    for number in range(60):
        for label, tenant in ((2, "other"), (3, "another")):
            job = make_job((label, number), cost=256)
            shard.add(replace(job, queue=f"p1:{tenant}"))
    for number in range(6):
        job = make_job((1, *range(40), number), cost=42 * 64)
        shard.add(replace(job, queue="p1:behind"))

    takers: list[str] = []
    for _ in range(30):
        dispatches = shard.tick()
        takers += [d.worker_id for d in dispatches if d.job.tenant == "behind"]
        # Whoever computes the prefix takes long.
        for worker in shard.workers.values():
            if worker.info.worker_id not in takers:
                shard.finish_all(worker)

    assert len(takers) == len(set(takers)) == 2
    assert any(job.tenant != "behind" for job in shard.waiting.values())
