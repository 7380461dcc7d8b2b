"""Which worker a job of the interactive lane is to wait for."""

from dataclasses import dataclass
from typing import NamedTuple

from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.pricing import Price, Pricing, WorkerLoads
from tidemill_scheduler.policy.queue_set import QueueSet
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.routing_hashes import shared_depth
from tidemill_scheduler.policy.sibling_order import SiblingOrder

#: Least loaded workers that are compared with those that hold a job's prefix.
_NUM_LEAST_LOADED = 2

#: Neighbours in prefix order that are asked, on each side, where they wait.
_NUM_NEIGHBOURS = 2

#: Jobs of a queue that are looked at for a steal, and the best of them that are looked at twice.
_NUM_SAMPLED = 24
_NUM_VERIFIED = 4


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Weights of the interactive lane; the defaults come from simulations."""

    #: What prefill on a worker costs all others that want it, as a multiple of its own time.
    affinity: float = 8.0
    #: An idle worker takes a job over if that saves this many times the prefill it adds.
    steal_guard: float = 2.0
    #: Seconds that a worker full of producing sequences counts as busy for them.
    decode_seconds: float = 0.05


class Home(NamedTuple):
    """A worker, and how many hashes of a job it will hold when the job comes."""

    worker_id: str
    depth: int


class Binding:
    """Weighs workers for a job by the time it would wait and the prefill it would need there."""

    def __init__(
        self,
        residency: Residency,
        loads: WorkerLoads,
        pricing: Pricing,
        queues: QueueSet,
        siblings: SiblingOrder,
        settings: LaneSettings,
    ) -> None:
        self._residency = residency
        self._loads = loads
        self._pricing = pricing
        self._queues = queues
        self._siblings = siblings
        self._settings = settings

    def choose(self, bound: BoundJob) -> Home:
        """Return where a job is to wait; there must be a queue."""
        holders = self._residency.holders(bound.key, 1)
        leader = self._leader(bound, holders)
        if leader is not None:
            return leader
        depths = self._candidates(bound, holders)
        able = [i for i in depths if self._loads.can_hold(i, bound.job)]
        if not able:
            able = [i for i in self._queues if self._loads.can_hold(i, bound.job)]
            depths |= {i: self._residency.depth(i, bound.key) for i in able}
        return min(
            (Home(worker_id, depths[worker_id]) for worker_id in able or depths),
            key=lambda home: (self._cost(bound, home), home.worker_id),
        )

    def expected_depth(self, bound: BoundJob, worker_id: str) -> int:
        """Return what a worker will hold of a job once those that wait there have gone."""
        held = self._residency.depth(worker_id, bound.key, bound.price.depth)
        return max(held, self._waiting_depths(bound).get(worker_id, 0))

    def best_to_move(self, victim: str, thief: str) -> BoundJob | None:
        """Return the job of one queue that gains most by waiting for another worker, if any does.

        What it gains is the time before it, less the prefill that moving it adds.
        """
        queue = self._queues.get(victim)
        assert queue is not None
        gains = [
            (self._gain(bound, bound.price, victim, thief), -bound.number, bound)
            for bound in queue.samples(_NUM_SAMPLED)
            if self._loads.can_hold(thief, bound.job)
        ]
        gains.sort(reverse=True)
        best, best_gain = None, 0.0
        for gain, _, bound in gains[:_NUM_VERIFIED]:
            if gain <= best_gain:
                break
            # Its siblings stay, and one of them pays for what they share.
            depth = self.expected_depth(bound, victim)
            price = self._pricing.price_at(bound.job, victim, depth)
            gain = self._gain(bound, price, victim, thief)
            if gain > best_gain:
                best, best_gain = bound, gain
        return best

    def _leader(self, bound: BoundJob, holders: list[tuple[str, int]]) -> Home | None:
        """The worker that is about to compute the greater part of a job's prompt."""
        if not holders:
            return None
        depth = holders[0][1]
        shared = depth * self._residency.tokens_per_hash
        if depth < self._residency.group_depth or 2 * shared < bound.job.cost:
            return None
        leader = self._residency.warming(bound.key, depth)
        if leader is None or leader not in self._queues:
            return None
        return Home(leader, depth) if self._loads.can_hold(leader, bound.job) else None

    def _candidates(self, bound: BoundJob, holders: list[tuple[str, int]]) -> dict[str, int]:
        depths = {worker_id: depth for worker_id, depth in holders if worker_id in self._queues}
        waiting = self._waiting_depths(bound)
        for worker_id in (*waiting, *self._queues.least_loaded(_NUM_LEAST_LOADED)):
            if worker_id not in depths:
                depths[worker_id] = self._residency.depth(worker_id, bound.key)
        for worker_id, depth in waiting.items():
            depths[worker_id] = max(depth, depths[worker_id])
        return depths

    def _cost(self, bound: BoundJob, home: Home) -> float:
        prefill = self._pricing.price_at(bound.job, home.worker_id, home.depth).seconds
        ahead = self._queues.seconds_ahead(home.worker_id)
        return ahead + (1 + self._settings.affinity) * prefill

    def _waiting_depths(self, bound: BoundJob) -> dict[str, int]:
        """How much of a job's prompt its neighbours share, by the workers they wait for."""
        depths: dict[str, int] = {}
        for other in self._siblings.nearest(bound, _NUM_NEIGHBOURS):
            if other.worker_id is not None and (depth := shared_depth(bound.key, other.key)):
                depths[other.worker_id] = max(depth, depths.get(other.worker_id, 0))
        return depths

    def _gain(self, bound: BoundJob, price: Price, victim: str, thief: str) -> float:
        there = self._pricing.price(bound.job, bound.key, thief, price.depth)
        added = self._settings.steal_guard * (there.seconds - price.seconds)
        return self._queues.seconds_ahead(victim) - added
