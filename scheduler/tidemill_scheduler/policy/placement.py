"""Which of a model's workers takes which of its waiting jobs."""

from collections.abc import Collection
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tidemill_scheduler.fleet.workers import Worker, reluctance
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.accounts import Accounts, Running
from tidemill_scheduler.policy.fleet import Fleet
from tidemill_scheduler.policy.hints import Hints
from tidemill_scheduler.policy.lanes import AnyLanes
from tidemill_scheduler.policy.residency import Residency


class Dispatch(NamedTuple):
    """A decision: this job to this worker, expected to prefill ``tokens`` uncached tokens."""

    job: WaitingJob
    worker_id: str
    tokens: int


class Moment(NamedTuple):
    """Now, and since when a worker must have been heard of to get jobs, and not as the last one."""

    now: float
    silent_since: float
    fresh_since: float


class Placement:
    """Fills the workers that may have room, the least loaded first.

    A worker is looked at after something happened to it: a status, a job bound to it, a job that
    came while it was idle.  So an event costs the same however many workers there are.
    """

    def __init__(
        self,
        waiting: dict[str, WaitingJob],
        lanes: AnyLanes,
        fleet: Fleet,
        residency: Residency,
        accounts: Accounts,
        hints: Hints,
        *,
        tokens_per_hash: int,
    ) -> None:
        self._waiting = waiting
        self._accounts = accounts
        self._hints = hints
        self._lanes = lanes
        self._fleet = fleet
        self._residency = residency
        self._tokens_per_hash = tokens_per_hash
        # Workers to look at, and those that found nothing although they have room.
        self._ready: dict[str, None] = {}
        self._idle: dict[str, None] = {}
        self._heap: list[tuple[bool, float, str]] = []
        # The last job of the batch lane that each worker got in this run.
        self._walked: dict[str, WaitingJob] = {}
        self._moment = Moment(0.0, 0.0, 0.0)
        # Set when the least loaded worker found nothing to take over: then nobody would.
        self._is_barren = False
        #: Jobs taken out because the worker whose turn they were cannot hold them.
        self.too_large: list[WaitingJob] = []

    @property
    def is_unfinished(self) -> bool:
        """Whether another run could decide more at once."""
        return bool(self._ready and len(self._lanes)) or bool(self.too_large)

    def has_nothing_for(self, worker_id: str) -> bool:
        """Whether a worker was asked since anything changed for it, and there was nothing."""
        return worker_id in self._idle

    def wake(self, worker_id: str) -> None:
        """Look at a worker in the next run."""
        self._idle.pop(worker_id, None)
        self._ready[worker_id] = None

    def wake_idle(self) -> None:
        """Look at one of those that found nothing; it wakes the next one when it is full."""
        if self._idle:
            self._ready[self._idle.popitem()[0]] = None

    def wake_all(self) -> None:
        """Look at every worker."""
        self._idle.clear()
        self._ready = dict.fromkeys(self._fleet.ids())

    def forget(self, worker_id: str) -> None:
        """Never look at a worker again."""
        self._idle.pop(worker_id, None)
        self._ready.pop(worker_id, None)

    def run(self, limit: int, moment: Moment, barred: Collection[str] = ()) -> list[Dispatch]:
        """Decide up to ``limit`` times; whom it fills is charged.  ``barred`` workers wait."""
        self._begin(moment, barred)
        dispatches: list[Dispatch] = []
        while self._heap and len(self._lanes) and len(dispatches) + len(self.too_large) < limit:
            worker = self._fleet[heappop(self._heap)[2]]
            job = self._next_for(worker)
            if job is None:
                self._found_nothing(worker)
            elif (dispatch := self._place(job, target := self._target_of(job, worker))) is not None:
                dispatches.append(dispatch)
                self._after(worker, target)
            elif target.can_hold(job):
                self._rouse()
            else:
                self._set_aside(job)
                self._push(worker)
        self._end()
        return dispatches

    def _found_nothing(self, worker: Worker) -> None:
        # One that was open to interactive jobs alone waits for its next status.
        if worker.has_credit:
            self._idle[worker.info.worker_id] = None
            self._is_barren = True

    def _begin(self, moment: Moment, barred: Collection[str]) -> None:
        self._moment = moment
        self.too_large = []
        self._is_barren = False
        ready, self._ready = self._ready, {}
        self._heap = []
        for worker_id in ready:
            if worker_id in barred:
                self._ready[worker_id] = None
            elif (worker := self._fleet.get(worker_id)) is not None and self._is_open(worker):
                self._heap.append(self._rank(worker))
        if len(self._heap) > 1:
            heapify(self._heap)

    def _end(self) -> None:
        # With jobs left, their turn did not come; without, they found nothing.
        if self._heap:
            rest = self._ready if len(self._lanes) else self._idle
            rest.update((worker_id, None) for _, _, worker_id in self._heap)
            self._heap = []
        for worker_id, job in self._walked.items():
            self._hints.dispatched(job, worker_id)
        self._walked.clear()

    def _is_open(self, worker: Worker) -> bool:
        if worker.heard_at < self._moment.silent_since or worker.is_draining:
            return False
        return worker.has_credit or (self._lanes.has_urgent and worker.has_urgent_credit)

    def _next_for(self, worker: Worker) -> WaitingJob | None:
        if self._lanes.has_urgent and not worker.has_credit:
            return self._lanes.urgent_for(worker.info.worker_id, self._moment.now)
        yields = None if self._is_barren else partial(self._yields, thief=worker)
        return self._lanes.next_for(worker.info.worker_id, self._moment.now, yields)

    def _target_of(self, job: WaitingJob, worker: Worker) -> Worker:
        if worker.can_hold(job) and worker.info.worker_id != job.last_worker:
            return worker
        others = (w for w in self._fleet if self._is_open(w) and w.fits(job, self.uncached(job, w)))
        fresh_since = self._moment.fresh_since
        return min(others, key=lambda w: reluctance(w, job, fresh_since), default=worker)

    def _set_aside(self, job: WaitingJob) -> None:
        self._lanes.remove(job)
        self.too_large.append(job)

    def _place(self, job: WaitingJob, target: Worker) -> Dispatch | None:
        depth = self._residency.depth(target.info.worker_id, job.kv_key)
        tokens = max(1, job.cost - depth * self._tokens_per_hash)
        is_urgent = job.priority_class == 0
        if not target.fits(job, tokens, is_urgent=is_urgent):
            return None
        worker_id = target.info.worker_id
        price = self._accounts.price(job, tokens)
        is_bound = self._lanes.is_bound(job)
        is_charged = self._lanes.take(job, worker_id, price, self._moment.now)
        del self._waiting[job.job_id]
        self._residency.dispatched(worker_id, job.kv_key)
        self._accounts.charged(worker_id, Running(job, price if is_charged else None))
        if not (is_bound or job.attempts):
            self._walked[worker_id] = job
        target.reserve(job.job_id, tokens, is_urgent=is_urgent, num_seqs=job.num_outputs)
        return Dispatch(job, worker_id, tokens)

    def _yields(self, owner_id: str, thief: Worker) -> bool:
        owner = self._fleet.get(owner_id)
        if owner is None or not self._is_open(owner) or self._gives_way(owner, thief):
            return True
        job = self._lanes.walks(owner_id)
        return job is not None and not owner.fits(job, self.uncached(job, owner))

    def uncached(self, job: WaitingJob, worker: Worker) -> int:
        """Return how many tokens of a job's prompt a worker would have to compute."""
        depth = self._residency.depth(worker.info.worker_id, job.kv_key)
        return max(1, job.cost - depth * self._tokens_per_hash)

    def _after(self, worker: Worker, target: Worker) -> None:
        self._push(worker)
        if target is not worker and not any(e[2] == target.info.worker_id for e in self._heap):
            self._push(target)
        # One is enough: it takes over from who is full, and wakes the next once it is full itself.
        if self._idle and _is_crowded(target, self._fleet[next(reversed(self._idle))]):
            self._rouse()

    def _rouse(self) -> None:
        if self._idle:
            self._push(self._fleet[self._idle.popitem()[0]])
            self._is_barren = False

    def _push(self, worker: Worker) -> None:
        if self._is_open(worker):
            heappush(self._heap, self._rank(worker))

    def _rank(self, worker: Worker) -> tuple[bool, float, str]:
        return (self._is_stale(worker), worker.load, worker.info.worker_id)

    def _gives_way(self, owner: Worker, other: Worker) -> bool:
        is_silent = self._is_stale(owner) and not self._is_stale(other)
        return is_silent or _is_crowded(owner, other)

    def _is_stale(self, worker: Worker) -> bool:
        return worker.heard_at <= self._moment.fresh_since


def _is_crowded(owner: Worker, other: Worker) -> bool:
    return owner.num_seqs - other.num_seqs >= owner.seq_slack
