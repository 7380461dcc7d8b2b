"""What one job costs the whole scheduler of the daemon, from its arrival to its end."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import process_time

from daemon_jobs import TOKENS_PER_HASH, JobSource

from tidemill.protocol.messages import FinishedSequence, KvEvents, WorkerInfo, WorkerStatus
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import Scheduler

#: Workers that take jobs while they are timed, and the jobs that all of them take.
_NUM_WORKERS = 8
_NUM_TAKEN = 2_000
#: Steps so large that a worker takes about ten jobs at a time.
_STEP_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Timing:
    """So many operations of one name took so many seconds together."""

    name: str
    seconds: float
    count: int


class SchedulerCosts:
    """Jobs go through a ``Scheduler`` in which ``num_jobs`` wait all the time."""

    title = "whole scheduler"

    def __init__(self, num_jobs: int, num_hashes: int) -> None:
        source = JobSource(num_jobs, num_hashes)
        self._jobs = source.take(num_jobs)
        self._newcomers = source.take(min(_NUM_TAKEN, num_jobs // 2))

    def timings(self) -> Iterator[Timing]:
        """Let all jobs wait, then let workers take some of them while others come."""
        scheduler = make_scheduler(_NUM_WORKERS)
        for job in self._jobs:
            scheduler.add_job(job)
        began = process_time()
        for job in self._newcomers:
            scheduler.add_job(job)
        yield Timing("arrival", process_time() - began, len(self._newcomers))
        fleet = _Fleet(scheduler)
        fleet.take(len(self._newcomers))
        yield Timing("decision", sum(fleet.ticks), fleet.num_taken)
        yield Timing("status", fleet.status_seconds, fleet.num_taken)
        yield Timing("KV hash", fleet.kv_seconds, fleet.num_hashes)
        yield Timing("tick p99", sorted(fleet.ticks)[math.ceil(0.99 * len(fleet.ticks)) - 1], 1)


def make_scheduler(num_workers: int) -> Scheduler:
    """Return a scheduler with idle workers of the benchmark's model."""
    scheduler = Scheduler(silent_seconds=math.inf)
    for number in range(num_workers):
        info = WorkerInfo(
            worker_id=f"worker-{number}",
            model="model",
            num_blocks=400_000,
            max_num_seqs=256,
            max_num_batched_tokens=_STEP_TOKENS,
            wire_version=1,
        )
        scheduler.add_worker(info, 0.0)
    return scheduler


class _Fleet:
    """Workers that compute and finish in each step whatever they were given."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._running: dict[str, list[Dispatch]] = {}
        self._num_batches: dict[str, int] = {}
        self.ticks: list[float] = []
        self.status_seconds = 0.0
        self.kv_seconds = 0.0
        self.num_taken = 0
        self.num_hashes = 0

    def take(self, num_jobs: int) -> None:
        """Step until so many jobs were taken."""
        while self.num_taken < num_jobs:
            began = process_time()
            dispatches = self._scheduler.tick(1.0)
            self.ticks.append(process_time() - began)
            self._send(dispatches)
            for worker_id, running in self._running.items():
                self._step(worker_id, running)
            self._running = {}
            self._scheduler.take_hints()

    def _send(self, dispatches: list[Dispatch]) -> None:
        began = process_time()
        for dispatch in dispatches:
            self.num_taken += 1
            self._scheduler.sent(dispatch, f"5-{self.num_taken}", 1.0)
        self.status_seconds += process_time() - began
        for dispatch in dispatches:
            self._running.setdefault(dispatch.worker_id, []).append(dispatch)

    def _step(self, worker_id: str, running: list[Dispatch]) -> None:
        events, status = self._events(worker_id, running), self._status(running)
        began = process_time()
        self._scheduler.apply_kv(worker_id, events)
        middle = process_time()
        self._scheduler.update_worker(worker_id, status, 1.0)
        self.kv_seconds += middle - began
        self.status_seconds += process_time() - middle

    def _events(self, worker_id: str, running: list[Dispatch]) -> KvEvents:
        self._num_batches[worker_id] = self._num_batches.get(worker_id, 0) + 1
        sizes = [d.tokens // TOKENS_PER_HASH * ROUTING_HASH_BYTES for d in running]
        tails = [d.job.key[-size:] for d, size in zip(running, sizes, strict=True) if size]
        stored = b"".join(tails)
        self.num_hashes += len(stored) // ROUTING_HASH_BYTES
        return KvEvents(seq=self._num_batches[worker_id], stored=stored)

    def _status(self, running: list[Dispatch]) -> WorkerStatus:
        finished = [FinishedSequence(job_id=d.job.job_id, output_tokens=60) for d in running]
        return WorkerStatus(
            last_command=f"5-{self.num_taken}",
            free_blocks=300_000,
            step_seconds=0.05,
            finished=tuple(finished),
        )
