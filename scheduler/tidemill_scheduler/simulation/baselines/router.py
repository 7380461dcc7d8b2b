"""The frame of all baselines: route each job to a worker, then serve each worker's queue."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerInfo, WorkerStatus
from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.routing_hashes import split_key
from tidemill_scheduler.simulation.baselines.backend import Backend


class _Route(NamedTuple):
    """The worker in whose queue a job waits, and what it was to compute when it came there."""

    backend: Backend
    tokens: int


class Router(ABC):
    """Routes jobs in the order they came; subclasses choose the worker.

    ``route`` may return None: then the job, and all behind it, wait in the router.  Jobs of higher
    priority are not preferred, except that what a dead worker gave back comes first.
    """

    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {}
        self._unrouted: deque[WaitingJob] = deque()
        self._waiting: dict[str, WaitingJob] = {}
        self._routes: dict[str, _Route] = {}
        self._ready: dict[str, None] = {}
        self._is_blocked = False
        self.is_unfinished = False

    # What subclasses decide.

    @abstractmethod
    def route(self, job: WaitingJob) -> Backend | None:
        """Return the worker for a job, None while it must wait in the router."""

    def routed(self, job: WaitingJob, backend: Backend) -> None:  # noqa: B027  # a hook, mostly unused
        """Note that a job was routed."""

    def pick(self, backend: Backend) -> WaitingJob:
        """Return which job of a worker's queue it takes next."""
        return backend.queue[0]

    # The interface of a policy.

    @property
    def num_waiting(self) -> int:
        """Jobs not sent to a worker."""
        return len(self._waiting)

    def add_job(self, job: WaitingJob) -> WaitingJob | None:
        """Let a job wait to be routed."""
        older = self._waiting.get(job.job_id)
        if older is not None:
            self.forget(job.job_id)
        self._waiting[job.job_id] = job
        if job.attempts:
            self._unrouted.appendleft(job)
        else:
            self._unrouted.append(job)
        return older

    def forget(self, job_id: str) -> bool:
        """Forget a job, routed or not."""
        job = self._waiting.pop(job_id, None)
        if job is None:
            return False
        if job_id in self._routes:
            self._leave(job)
        else:
            self._unrouted.remove(job)
        return True

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        """Route to one more worker."""
        self.backends[info.worker_id] = Backend(info, now)
        self._changed(info.worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Route what waits for a worker anew."""
        backend = self.backends.pop(worker_id)
        self._ready.pop(worker_id, None)
        for job in reversed(backend.queue):
            del self._routes[job.job_id]
            self._unrouted.appendleft(job)
        self._is_blocked = False

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Take in a worker's status."""
        backend = self.backends.get(worker_id)
        if backend is not None:
            backend.update(status, now)
            self._changed(worker_id)

    def apply_kv(self, worker_id: str, events: KvEvents) -> bool:
        """Follow a worker's prefix cache."""
        backend = self.backends.get(worker_id)
        if backend is not None:
            backend.cached.update(split_key(events.stored))
            backend.cached.difference_update(split_key(events.evicted))
        return True

    def reset_kv(self, worker_id: str, snapshot: KvSnapshot) -> None:
        """Replace what is known of a worker's prefix cache."""
        backend = self.backends.get(worker_id)
        if backend is not None:
            backend.cached = set(split_key(snapshot.digests))

    def tick(self, now: float) -> Sequence[Dispatch]:
        """Route what can be routed and send what workers have credit for."""
        self._route_all()
        dispatches: list[Dispatch] = []
        for worker_id in list(self._ready):
            dispatches += self._serve(self.backends[worker_id])
        self._ready.clear()
        return dispatches

    def sent(self, dispatch: Dispatch, command_id: str) -> None:
        """Note the command of a dispatch."""
        backend = self.backends.get(dispatch.worker_id)
        if backend is not None:
            backend.worker.sent(dispatch.job.job_id, command_id)

    def dropped(self, dispatch: Dispatch) -> None:
        """Take back what a dispatch was charged."""
        backend = self.backends.get(dispatch.worker_id)
        if backend is not None:
            backend.worker.drop(dispatch.job.job_id)
            backend.running.pop(dispatch.job.job_id, None)
            self._changed(dispatch.worker_id)

    def uncached(self, job: WaitingJob, backend: Backend) -> int:
        """Return how many prompt tokens a worker would have to compute, by its KV events."""
        tokens_per_hash = ROUTING_STRIDE * backend.info.block_size
        return max(1, job.cost - backend.cached_depth(job.kv_key) * tokens_per_hash)

    def _changed(self, worker_id: str) -> None:
        self._ready[worker_id] = None
        self._is_blocked = False

    def _route_all(self) -> None:
        while self._unrouted and self.backends and not self._is_blocked:
            job = self._unrouted[0]
            backend = self.route(job)
            if backend is None:
                self._is_blocked = True
                return
            self._unrouted.popleft()
            tokens = self.uncached(job, backend)
            self._routes[job.job_id] = _Route(backend, tokens)
            backend.queue.append(job)
            backend.queued_tokens += tokens
            self._ready[backend.info.worker_id] = None
            self.routed(job, backend)

    def _serve(self, backend: Backend) -> Iterator[Dispatch]:
        while backend.queue and backend.worker.has_credit:
            job = self.pick(backend)
            tokens = self.uncached(job, backend)
            if not backend.worker.fits(job, tokens):
                return
            self._leave(job)
            del self._waiting[job.job_id]
            backend.worker.reserve(job.job_id, tokens)
            backend.running[job.job_id] = (job, tokens)
            yield Dispatch(job, backend.info.worker_id, tokens)

    def _leave(self, job: WaitingJob) -> None:
        backend, tokens = self._routes.pop(job.job_id)
        if backend.queue[0] is job:
            backend.queue.popleft()
        else:
            backend.queue.remove(job)
        backend.queued_tokens -= tokens
