"""Which job goes to which worker, and next: pure decisions over plain data."""

from collections.abc import Callable

from tidemill.protocol.calls import Backlog
from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerInfo, WorkerStatus
from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.ageing import DEFAULT_AGE_SECONDS, NUM_CLASSES
from tidemill_scheduler.policy.hints import Hint
from tidemill_scheduler.policy.model_desk import ModelDesk
from tidemill_scheduler.policy.placement import Dispatch, Moment
from tidemill_scheduler.policy.settings import PolicySettings

#: Decisions of one tick.
MAX_PER_TICK = 128

_DEFAULT_SETTINGS = PolicySettings()


class Scheduler:
    """Owns the waiting jobs and the workers' credit; never does I/O and never reads a clock.

    Times are seconds on any one clock.  A worker not heard of for ``silent_seconds`` gets nothing.
    A job that waited ``age_seconds`` counts as one of the next higher class, see ``Lanes``;
    ``weight_of`` tells a tenant's share.
    """

    def __init__(
        self,
        *,
        silent_seconds: float,
        age_seconds: float = DEFAULT_AGE_SECONDS,
        settings: PolicySettings = _DEFAULT_SETTINGS,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        self._silent_seconds = silent_seconds
        self._age_seconds = age_seconds
        self._settings = settings
        self._weight_of = weight_of
        self._jobs: dict[str, WaitingJob] = {}
        self._desks: dict[str, ModelDesk] = {}
        # Worker id -> its model's desk.
        self._desk_of: dict[str, ModelDesk] = {}
        self._now = 0.0

    @property
    def fresh_seconds(self) -> float:
        """A worker not heard of for so long gets only what others have no room for."""
        return self._silent_seconds / 2

    @property
    def is_unfinished(self) -> bool:
        """Whether the last tick left jobs that another one can decide on at once."""
        return any(desk.is_unfinished for desk in self._desks.values())

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
        return frozenset(self._desk_of)

    @property
    def models(self) -> frozenset[str]:
        """The models that registered workers serve."""
        return frozenset(model for model, desk in self._desks.items() if len(desk.fleet))

    def backlog(self) -> Backlog:
        """Return what waits, over all models, at the rate that the workers' steps suggest."""
        desks = self._desks.values()
        works = [desk.lanes.work for desk in desks]
        work = [sum(values) for values in zip(*works, strict=True)] or [0.0] * NUM_CLASSES
        tenants = [sum(d.lanes.num_tenants(rank) for d in desks) for rank in range(NUM_CLASSES)]
        jobs = [sum(d.lanes.num_jobs(rank) for d in desks) for rank in range(NUM_CLASSES)]
        return Backlog(
            work_by_class=(work[0], work[1], work[2]),
            num_tenants_by_class=(tenants[0], tenants[1], tenants[2]),
            tokens_per_second=sum(desk.fleet.tokens_per_second for desk in desks),
            num_jobs_by_class=(jobs[0], jobs[1], jobs[2]),
            class_weights=self._settings.class_weights,
        )

    def add_job(self, job: WaitingJob) -> WaitingJob | None:
        """Let a job wait; returns the older pointer of the same job that this one replaces."""
        older = self._jobs.get(job.job_id)
        if older is not None and older.entry_id == job.entry_id:
            return None
        if older is not None:
            self.remove_job(older.job_id)
        self._jobs[job.job_id] = job
        self._desk(job.model).add(job, self._now)
        return older

    def remove_job(self, job_id: str) -> None:
        """Forget a waiting job; raises ``KeyError``."""
        job = self._jobs.pop(job_id)
        desk = self._desks[job.model]
        desk.remove(job)
        self._drop_if_empty(desk)

    def forget(self, job_id: str) -> bool:
        """Forget a job that has ended; false if it does not wait here."""
        if job_id not in self._jobs:
            return False
        self.remove_job(job_id)
        return True

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        """Let a worker take jobs."""
        if info.worker_id in self._desk_of:
            self.remove_worker(info.worker_id)
        self._now = max(self._now, now)
        desk = self._desk(info.model)
        if desk.block_size != info.block_size and not len(desk.fleet):
            desk = self._rebuild(info.model, info.block_size)
        desk.add_worker(Worker(info, now))
        self._desk_of[info.worker_id] = desk

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker with its credit; raises ``KeyError``."""
        desk = self._desk_of.pop(worker_id)
        desk.remove_worker(worker_id, self._now)
        self._drop_if_empty(desk)

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Take in a worker's status; one of an unknown worker is ignored."""
        self._now = max(self._now, now)
        desk = self._desk_of.get(worker_id)
        if desk is not None:
            desk.update_worker(worker_id, status, now)

    def apply_kv(self, worker_id: str, events: KvEvents) -> bool:
        """Take in what changed in a worker's cache; false if something before it was missed."""
        desk = self._desk_of.get(worker_id)
        return desk is None or desk.residency.apply(worker_id, events)

    def reset_kv(self, worker_id: str, snapshot: KvSnapshot) -> None:
        """Take in all that a worker's cache holds; events after it go on with ``apply_kv``."""
        desk = self._desk_of.get(worker_id)
        if desk is not None:
            desk.residency.reset(worker_id, snapshot.seq, snapshot.digests)

    def tick(self, now: float) -> list[Dispatch]:
        """Decide what goes out now; each decision is charged until ``sent`` or ``dropped``.

        Bounded, so that decisions are not held back by others: call again until it returns nothing.
        """
        self._now = max(self._now, now)
        moment = Moment(now, now - self._silent_seconds, now - self.fresh_seconds)
        dispatches: list[Dispatch] = []
        for desk in self._desks.values():
            dispatches += desk.fill(MAX_PER_TICK - len(dispatches), moment)
        return dispatches

    def sent(self, dispatch: Dispatch, command_id: str, now: float | None = None) -> None:
        """The dispatch was written as this entry of the worker's command stream."""
        desk = self._desk_of.get(dispatch.worker_id)
        if desk is not None:
            desk.sent(dispatch, command_id, self._now if now is None else now)

    def dropped(self, dispatch: Dispatch) -> None:
        """The job was not queued any more, or the worker's status already counts it."""
        desk = self._desk_of.get(dispatch.worker_id)
        if desk is not None:
            desk.dropped(dispatch)

    def take_hints(self) -> list[Hint]:
        """Return what workers are to keep in their caches, as far as it changed."""
        return [hint for desk in self._desks.values() for hint in desk.take_hints()]

    def is_runnable(self, now: float) -> bool:
        """Whether a job waits while a worker for it has nothing to do, or none of them speaks."""
        silent_since = now - self._silent_seconds
        return any(desk.is_runnable(silent_since) for desk in self._desks.values())

    def find_hopeless(self, now: float, patience: float) -> list[tuple[WaitingJob, int]]:
        """Return jobs that no registered worker of their model could hold for so many seconds.

        With the tokens that the largest can hold; a bounded number, so call again.
        """
        found = (d.find_hopeless(now, patience, MAX_PER_TICK) for d in self._desks.values())
        return [pair for pairs in found for pair in pairs]

    def _drop_if_empty(self, desk: ModelDesk) -> None:
        if not len(desk) and not len(desk.fleet) and self._desks.get(desk.model) is desk:
            del self._desks[desk.model]

    def _desk(self, model: str) -> ModelDesk:
        if model not in self._desks:
            self._desks[model] = self._make_desk(model, DEFAULT_BLOCK_SIZE)
        return self._desks[model]

    def _rebuild(self, model: str, block_size: int) -> ModelDesk:
        """Order a model's jobs anew, for workers whose hashes stand for other numbers of tokens."""
        desk = self._desks[model] = self._make_desk(model, block_size)
        for job in self._jobs.values():
            if job.model == model:
                desk.add(job, self._now)
        return desk

    def _make_desk(self, model: str, block_size: int) -> ModelDesk:
        return ModelDesk(
            model,
            self._jobs,
            self._settings,
            block_size,
            age_seconds=self._age_seconds,
            weight_of=self._weight_of,
        )
