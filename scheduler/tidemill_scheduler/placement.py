"""Which of a model's workers takes which of its waiting jobs."""

from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.model_queue import ModelQueue
from tidemill_scheduler.prefix_order import GROUP_DEPTH
from tidemill_scheduler.residency import Residency
from tidemill_scheduler.workers import Worker, reluctance


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A decision: this job to this worker, expected to prefill ``tokens`` uncached tokens."""

    job: WaitingJob
    worker_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Hint:
    """What a worker should know of its prefix cache: routing hash -> waiting jobs, 0 for none."""

    worker_id: str
    refs: dict[bytes, int]


class Placement:
    """One filling-up of a model's workers (by id), the least loaded first.

    Workers not heard of since ``fresh_since`` get what the others have no room for.
    """

    def __init__(
        self,
        queue: ModelQueue,
        workers: dict[str, Worker],
        residency: Residency,
        fresh_since: float,
    ) -> None:
        self._queue = queue
        self._residency = residency
        self._workers = workers
        self._fresh_since = fresh_since
        #: Jobs taken out because the worker whose turn they were cannot hold them.
        self.too_large: list[WaitingJob] = []
        self._heap = [self._rank(w) for w in workers.values() if w.has_credit]
        heapify(self._heap)
        # Workers that found nothing to take, but might once another one is full or crowded.
        self._idle: list[str] = []
        # Set when the least loaded worker found no range to take over: then nobody would.
        self._is_barren = False

    def run(self, limit: int) -> list[Dispatch]:
        """Take up to ``limit`` jobs out of the queue and charge their workers."""
        dispatches: list[Dispatch] = []
        while self._heap and len(self._queue) and len(dispatches) + len(self.too_large) < limit:
            _, _, worker_id = heappop(self._heap)
            worker = self._workers[worker_id]
            job = self._next_for(worker)
            if job is None:
                self._idle.append(worker_id)
                self._is_barren = True
            elif not (target := self._target_of(job, worker)).can_hold(job):
                self._set_aside(job)
                self._push(worker_id)
            elif (dispatch := self._place(job, target)) is None:
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

    def _target_of(self, job: WaitingJob, worker: Worker) -> Worker:
        target = self._home_of(job, worker) or worker
        if target.can_hold(job) and target.info.worker_id != job.last_worker:
            return target
        others = (w for w in self._workers.values() if w.fits(job, self._uncached(job, w)))
        return min(others, key=lambda w: reluctance(w, job, self._fresh_since), default=target)

    def _set_aside(self, job: WaitingJob) -> None:
        self._queue.remove(job)
        self.too_large.append(job)

    def _place(self, job: WaitingJob, target: Worker) -> Dispatch | None:
        tokens = self._uncached(job, target)
        if not target.fits(job, tokens):
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
        if home is None or self._gives_way(home, worker):
            return None
        if self._queue.peek(home.info.worker_id) or not home.fits(job, self._uncached(job, home)):
            return None
        return home

    def _yields(self, owner_id: str, thief: Worker) -> bool:
        owner = self._workers.get(owner_id)
        if owner is None or self._gives_way(owner, thief):
            return True
        job = self._queue.peek(owner_id)
        return job is not None and not owner.fits(job, self._uncached(job, owner))

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
        heappush(self._heap, self._rank(self._workers[worker_id]))

    def _rank(self, worker: Worker) -> tuple[bool, float, str]:
        return (self._is_stale(worker), worker.load, worker.info.worker_id)

    def _gives_way(self, owner: Worker, other: Worker) -> bool:
        is_silent = self._is_stale(owner) and not self._is_stale(other)
        return is_silent or _is_crowded(owner, other)

    def _is_stale(self, worker: Worker) -> bool:
        return worker.heard_at <= self._fresh_since


def _is_crowded(owner: Worker, other: Worker) -> bool:
    return owner.num_seqs - other.num_seqs >= owner.seq_slack
