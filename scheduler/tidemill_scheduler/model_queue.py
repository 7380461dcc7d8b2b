"""The waiting jobs of one model: a prefix order for each priority."""

from collections.abc import Callable, Iterator

from sortedcontainers import SortedDict

from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.prefix_order import PrefixOrder

#: Jobs given back by a dead or draining worker come first; their readers have been waiting.
_Level = tuple[bool, int]


def _level_of(job: WaitingJob) -> _Level:
    return (job.attempts == 0, job.priority)


class ModelQueue:
    """Orders by level (requeued jobs, then integer priority, lower first), then by prefix."""

    def __init__(self) -> None:
        self._levels: SortedDict[_Level, PrefixOrder] = SortedDict()
        self._anchors: dict[str, bytes] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: WaitingJob) -> None:
        """Let a job wait."""
        level = _level_of(job)
        if level not in self._levels:
            self._levels[level] = PrefixOrder(self._anchors)
        self._levels[level].add(job)
        self._count += 1

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        level = _level_of(job)
        order = self._levels[level]
        order.remove(job.job_id)
        self._count -= 1
        if not order:
            del self._levels[level]

    def take(self, job: WaitingJob, worker_id: str) -> None:
        """Take a job out for a worker, which is at this place of the order from now on."""
        self.remove(job)
        self._anchors[worker_id] = job.key

    def peek(self, worker_id: str) -> WaitingJob | None:
        """Return the next job among those that are the worker's to walk."""
        return next((job for order in self._orders() if (job := order.peek(worker_id))), None)

    def next_for(self, worker_id: str, yields: Callable[[str], bool]) -> WaitingJob | None:
        """Return the worker's next job, of another's range if its own is empty.

        ``yields(owner)`` tells whether that worker gives up half of a group it works on.
        """
        for order in self._orders():
            job = order.peek(worker_id)
            if job is None and order.claim_range(worker_id, yields):
                job = order.peek(worker_id)
            if job is not None:
                return job
        return None

    def release(self, worker_id: str) -> None:
        """Forget a worker's place."""
        self._anchors.pop(worker_id, None)
        for order in self._orders():
            order.release(worker_id)

    def _orders(self) -> Iterator[PrefixOrder]:
        return iter(self._levels.values())
