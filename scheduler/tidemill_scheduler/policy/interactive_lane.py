"""Jobs that are bound to workers at once, but only in the daemon's memory."""

from collections.abc import Collection

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.binding import Binding, LaneSettings
from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.pricing import Price, Pricing, WorkerLoads
from tidemill_scheduler.policy.queue_set import QueueSet
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.routing_hashes import shared_depth
from tidemill_scheduler.policy.sibling_order import SiblingOrder

#: Neighbours on each side that are looked at when a job is sent, of those so many for whose prices
#: that makes a difference, and so many in a row for whose it makes none.
_NUM_NEIGHBOURS = 32
_NUM_REPRICED = 8
_NUM_UNCHANGED = 4

#: Jobs without a worker that get one whenever the lane is asked for something.
_NUM_ADOPTED = 4


class InteractiveLane:
    """Binds each job to the worker where it costs least; any job can move until it is sent.

    The cost of a worker is the work before the job, plus its prefill there weighed by
    ``1 + affinity``, since wasted prefill delays everybody.  Compared are the workers that hold its
    prefix, those where jobs wait that share it, and the least loaded ones.  A prompt of which the
    greater part is on its way to a worker follows there.

    Workers come in as they appear in ``loads``.  Times are seconds on any one monotonic clock.
    """

    def __init__(
        self,
        residency: Residency,
        loads: WorkerLoads,
        settings: LaneSettings | None = None,
    ) -> None:
        settings = settings or LaneSettings()
        self._residency = residency
        self._loads = loads
        self._pricing = Pricing(residency, loads)
        self._bound: dict[str, BoundJob] = {}
        self._queues = QueueSet(self._pricing, loads, settings.decode_seconds)
        self._siblings = SiblingOrder()
        self._binding = Binding(
            residency, loads, self._pricing, self._queues, self._siblings, settings
        )
        self._barred: set[str] = set()
        self._orphans: dict[int, BoundJob] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._bound)

    def __contains__(self, job: WaitingJob) -> bool:
        return job.job_id in self._bound

    def jobs(self) -> list[WaitingJob]:
        """Return all jobs here, in the order they came."""
        return [bound.job for bound in self._bound.values()]

    @property
    def work(self) -> int:
        """Tokens that are planned to be computed for all jobs that are bound."""
        return self._queues.work

    def add(self, job: WaitingJob, now: float) -> str | None:
        """Let a job wait; returns the worker it is bound to, None while there is none."""
        self._num_added += 1
        bound = self._bound[job.job_id] = BoundJob(job, self._num_added)
        self._siblings.add(bound)
        self._orphans[bound.number] = bound
        self._adopt()
        return bound.worker_id

    def tenants(self, worker_id: str) -> Collection[str]:
        """Return who has jobs that are bound to a worker."""
        self._adopt()
        queue = self._queues.get(worker_id)
        return () if queue is None else queue.tenants

    def peek(self, worker_id: str, tenant: str, now: float) -> WaitingJob | None:
        """Return a tenant's next job for a worker, see ``TenantQueue``."""
        self._adopt()
        queue = self._queues.get(worker_id)
        if queue is None:
            return None
        bound = queue.pick(tenant, now, self._loads.busy_seconds(worker_id))
        return None if bound is None else bound.job

    def take(self, job: WaitingJob, worker_id: str, now: float) -> None:
        """Take a job out that is sent to a worker, its own or another; raises ``KeyError``."""
        bound = self._bound[job.job_id]
        self._unbind(bound, is_pick=bound.worker_id == worker_id)
        self._reprice_siblings(bound, worker_id)
        self._forget(bound)

    def remove(self, job: WaitingJob) -> None:
        """Take a job out that is not to run; raises ``KeyError``."""
        bound = self._bound[job.job_id]
        self._unbind(bound)
        self._forget(bound)

    def steal(self, worker_id: str, now: float) -> WaitingJob | None:
        """Bind a job of the longest queue to a worker that has nothing to do, and return it.

        Only where the time it would wait there outweighs the prefill that moving it adds.
        """
        self._adopt()
        victim = self._queues.longest(worker_id)
        if victim is None or worker_id not in self._queues:
            return None
        bound = self._binding.best_to_move(victim, worker_id)
        if bound is None:
            return None
        self._unbind(bound)
        self._queues.bind(bound, worker_id, self._binding.expected_depth(bound, worker_id))
        return bound.job

    def release(self, worker_id: str, now: float) -> None:
        """Bind a worker's jobs to others, now and in the calls to come.

        A worker that has left ``loads`` and the residency by now is gone; one that is still there
        drains and gets nothing more.
        """
        self._barred.discard(worker_id)
        for bound in self._queues.remove_worker(worker_id):
            self._orphans[bound.number] = bound
        if worker_id in self._loads.ids():
            self._barred.add(worker_id)
        self._adopt()

    def refresh(self, worker_id: str) -> None:
        """Look at a worker's load again, for it has told of itself."""
        if worker_id in self._queues:
            self._queues.refresh(worker_id)

    def _adopt(self) -> None:
        """Take in new workers, and bind some of the jobs that have none."""
        if len(self._queues) + len(self._barred) != len(self._loads.ids()):
            self._take_in()
        if not self._queues:
            return
        for _ in range(min(len(self._orphans), _NUM_ADOPTED)):
            bound = self._orphans.pop(next(iter(self._orphans)))
            self._queues.bind(bound, *self._binding.choose(bound))

    def _take_in(self) -> None:
        self._barred.intersection_update(self._loads.ids())
        for worker_id in self._loads.ids():
            if worker_id not in self._queues and worker_id not in self._barred:
                self._queues.add_worker(worker_id)

    def _unbind(self, bound: BoundJob, *, is_pick: bool = False) -> None:
        if bound.worker_id is None:
            del self._orphans[bound.number]
        else:
            self._queues.unbind(bound, is_pick=is_pick)

    def _forget(self, bound: BoundJob) -> None:
        self._siblings.remove(bound)
        del self._bound[bound.job.job_id]

    def _reprice_siblings(self, taken: BoundJob, worker_id: str) -> None:
        """Let those that wait for the worker profit from what the job leaves in its cache.

        A few are enough: when these are sent, their neighbours have their turn.  Those of a short
        queue are looked up at every pick anyway.
        """
        queue = self._queues.get(worker_id)
        if queue is None or queue.is_exact(taken.job.tenant):
            return
        for side in self._siblings.sides(taken, _NUM_NEIGHBOURS):
            num_changed = num_unchanged = 0
            for other in side:
                if other.worker_id != worker_id:
                    continue
                price = self._price_after(other, taken, worker_id)
                if price == other.price:
                    num_unchanged += 1
                else:
                    num_changed, num_unchanged = num_changed + 1, 0
                    other.set_price(price)
                    self._queues.place(other)
                if num_changed == _NUM_REPRICED or num_unchanged == _NUM_UNCHANGED:
                    break

    def _price_after(self, bound: BoundJob, taken: BoundJob, worker_id: str) -> Price:
        """The price once the worker has what a job brings, whether that is told yet or not."""
        brought = shared_depth(bound.key, taken.key)
        held = self._residency.depth(worker_id, bound.key, max(brought, bound.price.depth))
        depth = max(brought, held)
        if depth == bound.price.depth:
            return bound.price
        return self._pricing.price_at(bound.job, worker_id, depth)
