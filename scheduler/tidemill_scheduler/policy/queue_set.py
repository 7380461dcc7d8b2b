"""The virtual queues of all workers."""

from collections.abc import Iterator

from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.load_order import LoadOrder
from tidemill_scheduler.policy.pricing import Pricing, WorkerLoads
from tidemill_scheduler.policy.virtual_queue import VirtualQueue


class QueueSet:
    """One ``VirtualQueue`` for each worker, and which of them are short and long.

    A worker that is full of producing sequences counts as ``decode_seconds`` busier.
    """

    def __init__(self, pricing: Pricing, loads: WorkerLoads, decode_seconds: float) -> None:
        self._pricing = pricing
        self._loads = loads
        self._decode_seconds = decode_seconds
        self._queues: dict[str, VirtualQueue] = {}
        self._by_load = LoadOrder(self.seconds_ahead)
        self._by_length = LoadOrder(lambda worker_id: -self._queues[worker_id].seconds)
        #: Tokens that are planned to be computed for all jobs here.
        self.work = 0

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._queues

    def get(self, worker_id: str) -> VirtualQueue | None:
        """Return a worker's queue if there is one."""
        return self._queues.get(worker_id)

    def add_worker(self, worker_id: str) -> None:
        """Begin a queue."""
        self._queues[worker_id] = VirtualQueue(worker_id, self._reprice)
        self._by_load.add(worker_id)
        self._by_length.add(worker_id)

    def remove_worker(self, worker_id: str) -> list[BoundJob]:
        """End a queue, if there is one; returns its jobs, the oldest first, bound to nobody."""
        queue = self._queues.pop(worker_id, None)
        if queue is None:
            return []
        self._by_load.remove(worker_id)
        self._by_length.remove(worker_id)
        jobs = sorted(queue, key=lambda bound: bound.number)
        for bound in jobs:
            bound.worker_id = None
            self.work -= bound.planned.uncached
        return jobs

    def bind(self, bound: BoundJob, worker_id: str, depth: int) -> None:
        """Let a job wait for a worker that will have ``depth`` of its hashes when it comes."""
        bound.planned = self._pricing.price_at(bound.job, worker_id, depth)
        bound.set_price(self._pricing.look_up(bound.job, bound.key, worker_id, bound.planned))
        self._queues[worker_id].add(bound)
        self.work += bound.planned.uncached
        self.refresh(worker_id)

    def unbind(self, bound: BoundJob, *, is_pick: bool = False) -> None:
        """Take a bound job out, as its worker's pick or for another reason."""
        worker_id = bound.worker_id
        assert worker_id is not None
        queue = self._queues[worker_id]
        (queue.take if is_pick else queue.remove)(bound)
        self.work -= bound.planned.uncached
        self.refresh(worker_id)

    def place(self, bound: BoundJob) -> None:
        """Put a bound job where its new price belongs."""
        assert bound.worker_id is not None
        self._queues[bound.worker_id].place(bound)

    def refresh(self, worker_id: str) -> None:
        """Look at a worker's load again."""
        self._by_load.changed(worker_id)
        self._by_length.changed(worker_id)

    def least_loaded(self, count: int) -> list[str]:
        """Return up to ``count`` workers, the least loaded first."""
        return self._by_load.least(count)

    def longest(self, other_than: str) -> str | None:
        """Return the worker, another than this one, with the longest queue."""
        found = (i for i in self._by_length.least(2) if i != other_than)
        worker_id = next(found, None)
        return worker_id if worker_id and len(self._queues[worker_id]) else None

    def seconds_ahead(self, worker_id: str) -> float:
        """Return the seconds that a worker needs for what waits for it and what it was sent."""
        decode = self._decode_seconds * self._loads.decode_load(worker_id)
        queued = self._queues[worker_id].seconds
        return queued + self._loads.busy_seconds(worker_id) + decode

    def _reprice(self, bound: BoundJob) -> None:
        assert bound.worker_id is not None
        price = self._pricing.look_up(bound.job, bound.key, bound.worker_id, bound.price)
        if price is not bound.price:
            bound.set_price(price)
