"""Which job goes to which worker, and next: pure decisions over plain data."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.model_queue import ModelQueue
from tidemill_scheduler.prefix_order import GROUP_DEPTH
from tidemill_scheduler.residency import Residency
from tidemill_scheduler.workers import Worker

#: Decisions of one tick.
MAX_PER_TICK = 256


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A decision: this job to this worker, expected to prefill ``tokens`` uncached tokens."""

    job: WaitingJob
    worker_id: str
    tokens: int


class Scheduler:
    """Owns the waiting jobs and the workers' credit; never does I/O and never reads a clock.

    Times are seconds on any one clock.  A worker not heard of for ``silent_seconds`` gets nothing.
    """

    def __init__(self, *, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._workers: dict[str, Worker] = {}
        self._jobs: dict[str, WaitingJob] = {}
        self._queues: defaultdict[str, ModelQueue] = defaultdict(ModelQueue)
        self._residency = Residency()

    @property
    def num_waiting(self) -> int:
        """Jobs read and not dispatched."""
        return len(self._jobs)

    @property
    def worker_ids(self) -> frozenset[str]:
        """The registered workers."""
        return frozenset(self._workers)

    @property
    def models(self) -> frozenset[str]:
        """The models that registered workers serve."""
        return frozenset(worker.info.model for worker in self._workers.values())

    def add_job(self, job: WaitingJob) -> WaitingJob | None:
        """Let a job wait; returns the older pointer of the same job that this one replaces."""
        older = self._jobs.get(job.job_id)
        if older is not None and older.entry_id == job.entry_id:
            return None
        if older is not None:
            self.remove_job(older.job_id)
        self._jobs[job.job_id] = job
        self._queues[job.model].add(job)
        return older

    def remove_job(self, job_id: str) -> None:
        """Forget a waiting job; raises ``KeyError``."""
        job = self._jobs.pop(job_id)
        self._queues[job.model].remove(job)

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        """Let a worker take jobs."""
        if info.worker_id in self._workers:
            self.remove_worker(info.worker_id)
        self._workers[info.worker_id] = Worker(info, now)
        self._residency.add_worker(info.worker_id, info.num_blocks // ROUTING_STRIDE)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker with its credit; raises ``KeyError``."""
        worker = self._workers.pop(worker_id)
        self._residency.remove_worker(worker_id)
        self._queues[worker.info.model].release(worker_id)

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Take in a worker's status; one of an unknown worker is ignored."""
        if worker_id in self._workers:
            self._workers[worker_id].update(status, now)

    def tick(self, now: float) -> list[Dispatch]:
        """Decide what goes out now; each decision is charged until ``sent`` or ``dropped``.

        Bounded, so that decisions are not held back by others: call again until it returns nothing.
        """
        by_model: defaultdict[str, list[Worker]] = defaultdict(list)
        for worker in self._available(now):
            by_model[worker.info.model].append(worker)
        dispatches: list[Dispatch] = []
        for model, workers in by_model.items():
            limit = MAX_PER_TICK - len(dispatches)
            dispatches += _Round(self._queues[model], workers, self._residency).run(limit)
        for dispatch in dispatches:
            del self._jobs[dispatch.job.job_id]
        return dispatches

    def sent(self, dispatch: Dispatch, command_id: str) -> None:
        """The dispatch was written as this entry of the worker's command stream."""
        if dispatch.worker_id in self._workers:
            self._workers[dispatch.worker_id].sent(dispatch.job.job_id, command_id)

    def dropped(self, dispatch: Dispatch) -> None:
        """The job was not queued any more, or the worker's status already counts it."""
        if dispatch.worker_id in self._workers:
            self._workers[dispatch.worker_id].drop(dispatch.job.job_id)

    def is_runnable(self, now: float) -> bool:
        """Whether a job waits while a worker for it has nothing to do."""
        return any(
            worker.num_seqs == 0 and len(self._queues[worker.info.model])
            for worker in self._available(now)
        )

    def _available(self, now: float) -> Iterator[Worker]:
        for worker in self._workers.values():
            if not worker.is_draining and now - worker.heard_at <= self._silent_seconds:
                yield worker


class _Round:
    """One filling-up of a model's workers, the least loaded first."""

    def __init__(self, queue: ModelQueue, workers: Iterable[Worker], residency: Residency) -> None:
        self._queue = queue
        self._residency = residency
        self._workers = {worker.info.worker_id: worker for worker in workers}
        self._heap = [(w.load, id_) for id_, w in self._workers.items() if w.has_credit]
        heapify(self._heap)
        # Workers that found nothing to take, but might once another one is full or crowded.
        self._idle: list[str] = []
        # Set when the least loaded worker found no range to take over: then nobody would.
        self._is_barren = False

    def run(self, limit: int) -> list[Dispatch]:
        dispatches: list[Dispatch] = []
        while self._heap and len(self._queue) and len(dispatches) < limit:
            _, worker_id = heappop(self._heap)
            worker = self._workers[worker_id]
            job = self._next_for(worker)
            if job is None:
                self._idle.append(worker_id)
                self._is_barren = True
            elif (dispatch := self._place(job, worker)) is None:
                self._wake_idle()
            else:
                dispatches.append(dispatch)
                self._push(worker_id)
                self._share(dispatch.worker_id)
        return dispatches

    def _next_for(self, worker: Worker) -> WaitingJob | None:
        worker_id = worker.info.worker_id
        if self._is_barren:
            return self._queue.peek(worker_id)
        return self._queue.next_for(worker_id, partial(self._yields, thief=worker))

    def _place(self, job: WaitingJob, worker: Worker) -> Dispatch | None:
        target = self._home_of(job, worker) or worker
        tokens = self._uncached(job, target)
        if not target.fits(tokens):
            return None
        worker_id = target.info.worker_id
        self._queue.take(job, worker_id)
        self._residency.dispatched(worker_id, job.key)
        target.reserve(job.job_id, tokens)
        return Dispatch(job, worker_id, tokens)

    def _home_of(self, job: WaitingJob, worker: Worker) -> Worker | None:
        """The worker that has the job's prefix, if it has time and no walk to interrupt."""
        if self._residency.depth(worker.info.worker_id, job.key) >= GROUP_DEPTH:
            return None
        home = self._workers.get(self._residency.holder(job.key, GROUP_DEPTH) or "")
        if home is None or _is_crowded(home, worker):
            return None
        if self._queue.peek(home.info.worker_id) or not home.fits(self._uncached(job, home)):
            return None
        return home

    def _yields(self, owner_id: str, thief: Worker) -> bool:
        owner = self._workers.get(owner_id)
        if owner is None or _is_crowded(owner, thief):
            return True
        job = self._queue.peek(owner_id)
        return job is not None and not owner.fits(self._uncached(job, owner))

    def _uncached(self, job: WaitingJob, worker: Worker) -> int:
        depth = self._residency.depth(worker.info.worker_id, job.key)
        return max(1, job.cost - depth * ROUTING_STRIDE * worker.info.block_size)

    def _share(self, worker_id: str) -> None:
        if self._idle and _is_crowded(self._workers[worker_id], self._workers[self._idle[0]]):
            self._wake_idle()

    def _wake_idle(self) -> None:
        # One is enough: it takes over from who is full, and wakes the next once it is full itself.
        if self._idle:
            self._push(self._idle.pop())
            self._is_barren = False

    def _push(self, worker_id: str) -> None:
        heappush(self._heap, (self._workers[worker_id].load, worker_id))


def _is_crowded(owner: Worker, other: Worker) -> bool:
    return owner.num_seqs - other.num_seqs >= owner.seq_slack
