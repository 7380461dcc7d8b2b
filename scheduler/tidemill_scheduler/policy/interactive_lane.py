"""Jobs that are bound to workers at once, but only in the daemon's memory."""

from collections.abc import Collection
from dataclasses import dataclass

from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.load_order import LoadOrder
from tidemill_scheduler.policy.pricing import Price, Pricing, WorkerLoads
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.sibling_order import SiblingOrder
from tidemill_scheduler.policy.virtual_queue import VirtualQueue


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Weights of the interactive lane; the defaults come from simulations."""

    #: What prefill on a worker costs all others that want it, as a multiple of its own time.
    affinity: float = 8.0
    #: An idle worker takes a job over if that saves this many times the prefill it adds.
    steal_guard: float = 2.0
    #: Seconds that a worker full of producing sequences counts as busy for them.
    decode_seconds: float = 0.05


#: Least loaded workers that are compared with those that hold a job's prefix.
_NUM_LEAST_LOADED = 2

#: Neighbours in prefix order that are asked, on each side, where they wait.
_NUM_NEIGHBOURS = 2

#: Siblings, on each side, whose prices are looked up when a job is sent, and those in a row
#: without a change that end it.
_NUM_REPRICED = 64
_NUM_UNCHANGED = 4

#: Jobs of the longest queue that are looked at for a steal, and the best that are looked at twice.
_NUM_SAMPLED = 64
_NUM_VERIFIED = 8

#: Jobs without a worker that get one whenever the lane is asked for something.
_NUM_ADOPTED = 64


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
        self._residency = residency
        self._loads = loads
        self._settings = settings or LaneSettings()
        self._pricing = Pricing(residency, loads)
        self._bound: dict[str, BoundJob] = {}
        self._queues: dict[str, VirtualQueue] = {}
        self._barred: set[str] = set()
        self._orphans: dict[int, BoundJob] = {}
        self._siblings = SiblingOrder()
        self._by_load = LoadOrder(self._seconds_ahead)
        self._by_length = LoadOrder(lambda worker_id: -self._queues[worker_id].seconds)
        self._num_added = 0
        #: Tokens that are planned to be computed for all jobs here.
        self.work = 0

    def __len__(self) -> int:
        return len(self._bound)

    def __contains__(self, job: WaitingJob) -> bool:
        return job.job_id in self._bound

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

    def worker_of(self, job: WaitingJob) -> str | None:
        """Return the worker a job is bound to; raises ``KeyError``."""
        return self._bound[job.job_id].worker_id

    def queued_seconds(self, worker_id: str) -> float:
        """Return the seconds of prefill that wait for a worker."""
        queue = self._queues.get(worker_id)
        return 0.0 if queue is None else queue.seconds

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
        if bound.worker_id == worker_id:
            self._queues[worker_id].take(bound)
            self._noted(worker_id, bound)
        else:
            self._unbind(bound)
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
        if worker_id not in self._queues:
            return None
        victims = (v for v in self._by_length.least(2) if v != worker_id)
        victim = next(victims, None)
        bound = None if victim is None else self._best_to_move(victim, worker_id)
        if bound is None:
            return None
        self._unbind(bound)
        self._bind(bound, worker_id, self._expected_depth(bound, worker_id))
        return bound.job

    def release(self, worker_id: str, now: float) -> None:
        """Bind a worker's jobs to others, now and in the calls to come.

        A worker that has left ``loads`` and the residency by now is gone; one that is still there
        gets nothing more until ``readmit``.
        """
        self._barred.discard(worker_id)
        queue = self._queues.pop(worker_id, None)
        if queue is not None:
            self._by_load.remove(worker_id)
            self._by_length.remove(worker_id)
            self._orphan(list(queue))
        if worker_id in self._loads.ids():
            self._barred.add(worker_id)
        self._adopt()

    def readmit(self, worker_id: str) -> None:
        """Let a worker that was released but stayed take jobs again."""
        self._barred.discard(worker_id)

    def refresh(self, worker_id: str) -> None:
        """Look at a worker's load again, for it has told of itself."""
        if worker_id in self._queues:
            self._by_load.changed(worker_id)

    def _orphan(self, jobs: list[BoundJob]) -> None:
        for bound in sorted(jobs, key=lambda bound: bound.number):
            bound.worker_id = None
            self.work -= bound.planned.uncached
            self._orphans[bound.number] = bound

    def _adopt(self) -> None:
        """Take in new workers, and bind some of the jobs that have none."""
        if len(self._queues) + len(self._barred) != len(self._loads.ids()):
            self._take_in()
        if not self._queues:
            return
        for _ in range(min(len(self._orphans), _NUM_ADOPTED)):
            bound = self._orphans.pop(next(iter(self._orphans)))
            self._bind(bound, *self._choose(bound))

    def _take_in(self) -> None:
        self._barred.intersection_update(self._loads.ids())
        for worker_id in self._loads.ids():
            if worker_id not in self._queues and worker_id not in self._barred:
                self._queues[worker_id] = VirtualQueue(worker_id, self._reprice)
                self._by_load.add(worker_id)
                self._by_length.add(worker_id)

    def _choose(self, bound: BoundJob) -> tuple[str, int]:
        """Where a job is to wait, and how many of its hashes will be there before it."""
        holders = self._residency.holders(bound.key, 1)
        leader = self._leader(bound, holders)
        if leader is not None:
            return leader, holders[0][1]
        depths = self._candidates(bound, holders)
        able = [i for i in depths if self._loads.can_hold(i, bound.job)]
        if not able:
            able = [i for i in self._queues if self._loads.can_hold(i, bound.job)]
        costs = {i: self._cost(bound, i, depths) for i in able or depths}
        return min(costs.values())[1:]

    def _leader(self, bound: BoundJob, holders: list[tuple[str, int]]) -> str | None:
        """The worker that is about to compute the greater part of a job's prompt."""
        if not holders:
            return None
        depth = holders[0][1]
        shared = depth * self._residency.tokens_per_hash
        if depth < self._residency.group_depth or 2 * shared < bound.job.cost:
            return None
        leader = self._residency.warming(bound.key, depth)
        if leader not in self._queues or not self._loads.can_hold(leader, bound.job):
            return None
        return leader

    def _candidates(self, bound: BoundJob, holders: list[tuple[str, int]]) -> dict[str, int]:
        depths = {worker_id: depth for worker_id, depth in holders if worker_id in self._queues}
        for worker_id, depth in self._waiting_depths(bound).items():
            if worker_id not in depths:
                depths[worker_id] = self._residency.depth(worker_id, bound.key)
            depths[worker_id] = max(depths[worker_id], depth)
        for worker_id in self._by_load.least(_NUM_LEAST_LOADED):
            if worker_id not in depths:
                depths[worker_id] = self._residency.depth(worker_id, bound.key)
        return depths

    def _cost(
        self, bound: BoundJob, worker_id: str, depths: dict[str, int]
    ) -> tuple[float, str, int]:
        depth = depths.get(worker_id)
        if depth is None:
            depth = self._residency.depth(worker_id, bound.key)
        prefill = self._pricing.price_at(bound.job, worker_id, depth).seconds
        ahead = self._seconds_ahead(worker_id)
        return ahead + (1 + self._settings.affinity) * prefill, worker_id, depth

    def _seconds_ahead(self, worker_id: str) -> float:
        decode = self._settings.decode_seconds * self._loads.decode_load(worker_id)
        queued = self._queues[worker_id].seconds
        return queued + self._loads.busy_seconds(worker_id) + decode

    def _waiting_depths(self, bound: BoundJob) -> dict[str, int]:
        """How much of a job's prompt its neighbours share, by the workers they wait for."""
        depths: dict[str, int] = {}
        for side in self._siblings.around(bound, _NUM_NEIGHBOURS):
            for other, depth in side:
                if other.worker_id is not None:
                    depths[other.worker_id] = max(depth, depths.get(other.worker_id, 0))
        return depths

    def _expected_depth(self, bound: BoundJob, worker_id: str) -> int:
        """What a worker will hold for a job once those that wait there have gone."""
        depth = self._residency.depth(worker_id, bound.key, bound.price.depth)
        return max(depth, self._waiting_depths(bound).get(worker_id, 0))

    def _bind(self, bound: BoundJob, worker_id: str, depth: int) -> None:
        bound.planned = self._pricing.price_at(bound.job, worker_id, depth)
        bound.set_price(self._pricing.price(bound.job, bound.key, worker_id, depth))
        self._queues[worker_id].add(bound)
        self.work += bound.planned.uncached
        self._resort(worker_id)

    def _unbind(self, bound: BoundJob) -> None:
        worker_id = bound.worker_id
        if worker_id is None:
            del self._orphans[bound.number]
            return
        self._queues[worker_id].remove(bound)
        self._noted(worker_id, bound)

    def _noted(self, worker_id: str, bound: BoundJob) -> None:
        self.work -= bound.planned.uncached
        self._resort(worker_id)

    def _resort(self, worker_id: str) -> None:
        self._by_load.changed(worker_id)
        self._by_length.changed(worker_id)

    def _forget(self, bound: BoundJob) -> None:
        self._siblings.remove(bound)
        del self._bound[bound.job.job_id]

    def _reprice(self, bound: BoundJob) -> None:
        assert bound.worker_id is not None
        near = bound.price.depth
        bound.set_price(self._pricing.price(bound.job, bound.key, bound.worker_id, near))

    def _reprice_siblings(self, taken: BoundJob, worker_id: str) -> None:
        """Let those that wait for the worker profit from what the job leaves in its cache."""
        for side in self._siblings.around(taken, _NUM_REPRICED):
            num_unchanged = 0
            for other, depth in side:
                if other.worker_id != worker_id:
                    continue
                price = self._price_after(other, worker_id, depth)
                num_unchanged = num_unchanged + 1 if price == other.price else 0
                if num_unchanged == _NUM_UNCHANGED:
                    break
                other.set_price(price)
                self._queues[worker_id].place(other)

    def _price_after(self, bound: BoundJob, worker_id: str, depth: int) -> Price:
        """The price once the worker has so many of the job's hashes, whether told yet or not."""
        held = self._residency.depth(worker_id, bound.key, max(depth, bound.price.depth))
        return self._pricing.price_at(bound.job, worker_id, max(depth, held))

    def _best_to_move(self, victim: str, thief: str) -> BoundJob | None:
        gains = [
            (self._gain(bound, victim, thief, bound.price), -bound.number, bound)
            for bound in self._queues[victim].samples(_NUM_SAMPLED)
            if self._loads.can_hold(thief, bound.job)
        ]
        gains.sort(reverse=True)
        best: tuple[float, int, BoundJob] | None = None
        for gain, number, bound in gains[:_NUM_VERIFIED]:
            if gain <= 0 or (best is not None and gain <= best[0]):
                break
            # Those that stay pay what the job would have paid for them.
            depth = self._expected_depth(bound, victim)
            price = self._pricing.price_at(bound.job, victim, depth)
            gain = self._gain(bound, victim, thief, price)
            if gain > 0 and (best is None or gain > best[0]):
                best = (gain, number, bound)
        return None if best is None else best[2]

    def _gain(self, bound: BoundJob, victim: str, thief: str, price: Price) -> float:
        """Seconds that a job would wait at the victim, less what moving it costs."""
        there = self._pricing.price(bound.job, bound.key, thief)
        ahead = self._loads.busy_seconds(victim) + self._queues[victim].seconds
        return ahead - self._settings.steal_guard * (there.seconds - price.seconds)
