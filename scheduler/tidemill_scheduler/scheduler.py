"""Which job goes to which worker, and next: pure decisions over plain data."""

from collections import defaultdict
from collections.abc import Iterator

from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerInfo, WorkerStatus
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.ageing import DEFAULT_AGE_SECONDS
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.large_jobs import LargeJobs
from tidemill_scheduler.model_queue import ModelQueue
from tidemill_scheduler.placement import Dispatch, Hint, Placement
from tidemill_scheduler.quarantine import SUSPECT_CRASHES, Quarantine
from tidemill_scheduler.residency import Residency
from tidemill_scheduler.workers import Worker

#: Decisions of one tick.
MAX_PER_TICK = 256


class Scheduler:
    """Owns the waiting jobs and the workers' credit; never does I/O and never reads a clock.

    Times are seconds on any one clock.  A worker not heard of for ``silent_seconds`` gets nothing.
    A job that waited ``age_seconds`` counts as one of the next higher class, see ``ModelQueue``.
    """

    def __init__(self, *, silent_seconds: float, age_seconds: float = DEFAULT_AGE_SECONDS) -> None:
        self._silent_seconds = silent_seconds
        self._workers: dict[str, Worker] = {}
        self._jobs: dict[str, WaitingJob] = {}
        self._queues = defaultdict[str, ModelQueue](lambda: ModelQueue(age_seconds))
        self._quarantines: defaultdict[str, Quarantine] = defaultdict(Quarantine)
        self._large: defaultdict[str, LargeJobs] = defaultdict(LargeJobs)
        self._residency = Residency()
        #: Whether the last tick left jobs that another one can decide on at once.
        self.is_unfinished = False

    @property
    def fresh_seconds(self) -> float:
        """A worker not heard of for so long gets only what others have no room for."""
        return self._silent_seconds / 2

    @property
    def num_waiting(self) -> int:
        """Jobs read and not dispatched."""
        return len(self._jobs)

    @property
    def waiting_ids(self) -> list[str]:
        """The jobs read and not dispatched, as they are now."""
        return list(self._jobs)

    def waiting_job(self, job_id: str) -> WaitingJob | None:
        """Return a job if it waits here."""
        return self._jobs.get(job_id)

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
        if job_id in self._large[job.model]:
            self._large[job.model].remove(job)
        else:
            self._line_of(job).remove(job)

    def forget(self, job_id: str) -> bool:
        """Forget a job that has ended; false if it does not wait here."""
        if job_id not in self._jobs:
            return False
        self.remove_job(job_id)
        return True

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
        self.is_unfinished = False
        for model, workers in by_model.items():
            limit = MAX_PER_TICK - len(dispatches)
            dispatches += self._fill(model, workers, limit, now)
        for dispatch in dispatches:
            del self._jobs[dispatch.job.job_id]
        return dispatches

    def apply_kv(self, worker_id: str, events: KvEvents) -> bool:
        """Take in what changed in a worker's prefix cache; false if events before it are missing.

        This order guesses at caches, so it misses nothing.
        """
        return True

    def reset_kv(self, worker_id: str, snapshot: KvSnapshot) -> None:
        """Replace what was known of a worker's prefix cache."""

    def take_hints(self) -> list[Hint]:
        """Return what workers should be told of their prefix caches since the last call."""
        return []

    def sent(self, dispatch: Dispatch, command_id: str, now: float | None = None) -> None:
        """The dispatch was written at ``now`` as this entry of the worker's command stream."""
        if dispatch.worker_id in self._workers:
            self._workers[dispatch.worker_id].sent(dispatch.job.job_id, command_id, now)

    def dropped(self, dispatch: Dispatch) -> None:
        """The job was not queued any more, or the worker's status already counts it."""
        if dispatch.worker_id in self._workers:
            self._workers[dispatch.worker_id].drop(dispatch.job.job_id)

    def is_runnable(self, now: float) -> bool:
        """Whether a job waits while a worker for it has nothing to do, or none of them speaks."""
        return any(self._is_model_runnable(model, now) for model in self.models)

    def find_hopeless(self, now: float, patience: float) -> list[tuple[WaitingJob, int]]:
        """Return jobs that no registered worker of their model could hold for so many seconds.

        With the tokens that the largest can hold; a bounded number, so call again.
        """
        hopeless: list[tuple[WaitingJob, int]] = []
        for model in self.models:
            workers = [w for w in self._workers.values() if w.info.model == model]
            jobs = self._large[model].find_hopeless(workers, now, patience, MAX_PER_TICK)
            hopeless += [(job, max(w.capacity for w in workers)) for job in jobs]
        return hopeless

    def _is_model_runnable(self, model: str, now: float) -> bool:
        workers = [w for w in self._workers.values() if w.info.model == model and not w.is_draining]
        speaking = [worker for worker in workers if not self._is_silent(worker, now)]
        if speaking:
            return bool(len(self._queues[model])) and any(w.num_seqs == 0 for w in speaking)
        lines = (self._queues[model], self._quarantines[model], self._large[model])
        return bool(workers) and any(len(line) for line in lines)

    def _fill(
        self, model: str, workers: dict[str, Worker], limit: int, now: float
    ) -> list[Dispatch]:
        fresh_since = now - self.fresh_seconds
        others = dict(workers)
        dispatches: list[Dispatch] = []
        ward, suspect = self._quarantines[model].admit(workers, fresh_since)
        if ward is not None:
            del others[ward]
        if suspect is not None and ward is not None:
            dispatches.append(self._give(suspect, workers[ward]))
        dispatches += self._fill_large(model, others, fresh_since, limit)
        self._queues[model].now = now
        placement = Placement(self._queues[model], others, self._residency, fresh_since)
        dispatches += placement.run(limit - len(dispatches))
        for job in placement.too_large:
            self._large[model].add(job, now)
        self.is_unfinished |= bool(placement.too_large)
        return dispatches

    def _fill_large(
        self, model: str, workers: dict[str, Worker], fresh_since: float, limit: int
    ) -> list[Dispatch]:
        """Give large jobs out; the worker that must make room for the next leaves ``workers``."""
        dispatches: list[Dispatch] = []
        while len(dispatches) < limit:
            worker, job = self._large[model].admit(workers.values(), fresh_since)
            if worker is not None and job is not None:
                dispatches.append(self._give(job, worker))
                continue
            if worker is not None:
                del workers[worker.info.worker_id]
            break
        return dispatches

    def _give(self, job: WaitingJob, worker: Worker) -> Dispatch:
        worker_id = worker.info.worker_id
        worker.reserve(job.job_id, job.cost)
        self._residency.dispatched(worker_id, job.key)
        return Dispatch(job, worker_id, job.cost)

    def _line_of(self, job: WaitingJob) -> Quarantine | ModelQueue:
        lines = self._quarantines if job.crashes >= SUSPECT_CRASHES else self._queues
        return lines[job.model]

    def _available(self, now: float) -> Iterator[Worker]:
        for worker in self._workers.values():
            if not worker.is_draining and not self._is_silent(worker, now):
                yield worker

    def _is_silent(self, worker: Worker, now: float) -> bool:
        return now - worker.heard_at > self._silent_seconds
