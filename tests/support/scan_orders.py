"""Orders of bulk jobs, and workers that serve them, for tests."""

from collections.abc import Sequence
from itertools import groupby

from support.waiting_jobs import make_job
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.prefix_order import PrefixOrder

TOKENS = 64
DEPTH = 2
WORKERS = ("a", "b", "c")


def new_order(*workers: str, early_seconds: float = 0.0) -> PrefixOrder:
    """Return an order whose epochs are closed from their begin on, unless told otherwise."""
    return PrefixOrder(dict.fromkeys(workers), TOKENS, early_seconds=early_seconds)


def pop(order: PrefixOrder, worker: str, *, yields: bool = True) -> WaitingJob | None:
    job = order.peek(worker)
    if job is None and order.claim_range(worker, lambda owner: yields):
        job = order.peek(worker)
    if job is not None:
        order.take(job, worker)
    return job


def pop_all(order: PrefixOrder, worker: str) -> list[WaitingJob]:
    return [job for _ in range(len(order)) if (job := pop(order, worker))]


def group_of(job: WaitingJob) -> bytes:
    """What a job shares with its group; a job with a shorter key is a group of its own."""
    size = DEPTH * ROUTING_HASH_BYTES
    return job.key[:size] if len(job.key) >= size else job.job_id.encode()


def num_runs(jobs: list[WaitingJob]) -> int:
    return len(list(groupby(jobs, key=group_of)))


def add_all(
    order: PrefixOrder, all_paths: Sequence[tuple[int, ...]], cost: int = 1
) -> list[WaitingJob]:
    jobs = [make_job(path, cost=cost) for path in all_paths]
    for job in jobs:
        order.add(job)
    return jobs
