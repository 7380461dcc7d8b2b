"""Which job goes to which worker, and next: pure decisions over plain data."""

from collections import defaultdict
from collections.abc import Iterator

from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.model_queue import ModelQueue
from tidemill_scheduler.placement import Dispatch, Placement
from tidemill_scheduler.quarantine import SUSPECT_CRASHES, Quarantine
from tidemill_scheduler.residency import Residency
from tidemill_scheduler.workers import Worker

#: Decisions of one tick.
MAX_PER_TICK = 256


class Scheduler:
    """Owns the waiting jobs and the workers' credit; never does I/O and never reads a clock.

    Times are seconds on any one clock.  A worker not heard of for ``silent_seconds`` gets nothing.
    """

    def __init__(self, *, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._workers: dict[str, Worker] = {}
        self._jobs: dict[str, WaitingJob] = {}
        self._queues: defaultdict[str, ModelQueue] = defaultdict(ModelQueue)
        self._quarantines: defaultdict[str, Quarantine] = defaultdict(Quarantine)
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
        self._line_of(job).add(job)
        return older

    def remove_job(self, job_id: str) -> None:
        """Forget a waiting job; raises ``KeyError``."""
        job = self._jobs.pop(job_id)
        self._line_of(job).remove(job)

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
        by_model: defaultdict[str, dict[str, Worker]] = defaultdict(dict)
        for worker in self._available(now):
            by_model[worker.info.model][worker.info.worker_id] = worker
        dispatches: list[Dispatch] = []
        for model, workers in by_model.items():
            limit = MAX_PER_TICK - len(dispatches)
            dispatches += self._fill(model, workers, limit)
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

    def _fill(self, model: str, workers: dict[str, Worker], limit: int) -> list[Dispatch]:
        ward, suspect = self._quarantines[model].admit(workers)
        trial = [] if suspect is None else [self._try_out(suspect, workers[ward or ""])]
        others = {worker_id: w for worker_id, w in workers.items() if worker_id != ward}
        return trial + Placement(self._queues[model], others, self._residency).run(limit)

    def _try_out(self, job: WaitingJob, worker: Worker) -> Dispatch:
        worker.reserve(job.job_id, job.cost)
        return Dispatch(job, worker.info.worker_id, job.cost)

    def _line_of(self, job: WaitingJob) -> Quarantine | ModelQueue:
        lines = self._quarantines if job.crashes >= SUSPECT_CRASHES else self._queues
        return lines[job.model]

    def _available(self, now: float) -> Iterator[Worker]:
        for worker in self._workers.values():
            if not worker.is_draining and now - worker.heard_at <= self._silent_seconds:
                yield worker
