"""The waiting jobs of one model: a prefix order for each priority."""

from collections.abc import Callable, Iterator

from sortedcontainers import SortedDict

from tidemill_scheduler.ageing import Ageing
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.prefix_order import PrefixOrder

#: Jobs given back by a dead or draining worker come first; their readers have been waiting.
_Level = tuple[bool, int]

#: While jobs wait that have risen in class, so many others go out between two of theirs.
MAX_PASSED = 7


def _level_of(job: WaitingJob) -> _Level:
    return (job.attempts == 0, job.priority)


class ModelQueue:
    """Orders by level (requeued jobs, then integer priority, lower first), then by prefix.

    A job that has risen to the class that is served, see ``Ageing``, brings its level along, so
    that jobs with a common prefix stay together: after ``MAX_PASSED`` others one of that level is
    next.  Where several levels have risen the one with the longest waiting job is.

    So however many jobs of higher classes come, a job goes out at the latest when twice the ageing
    time has passed, and then ``MAX_PASSED + 1`` times as many jobs as came before it, or as the
    ``PrefixOrder`` of its level lets go before them.
    """

    def __init__(self, age_seconds: float) -> None:
        self._levels: SortedDict[_Level, PrefixOrder] = SortedDict()
        self._anchors: dict[str, bytes] = {}
        self._ageing = Ageing(age_seconds)
        self._num_passed = 0
        self._count = 0
        #: The time by which jobs age, in seconds on the clock of ``WaitingJob.since``.
        self.now = 0.0

    def __len__(self) -> int:
        return self._count

    def add(self, job: WaitingJob) -> None:
        """Let a job wait."""
        level = _level_of(job)
        if level not in self._levels:
            self._levels[level] = PrefixOrder(self._anchors)
        self._levels[level].add(job)
        if job.attempts == 0:
            self._ageing.add(job)
        self._count += 1

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        level = _level_of(job)
        order = self._levels[level]
        order.remove(job.job_id)
        if job.attempts == 0:
            self._ageing.remove(job)
        self._count -= 1
        if not order:
            del self._levels[level]

    def take(self, job: WaitingJob, worker_id: str) -> None:
        """Take a job out for a worker, which is at this place of the order from now on."""
        is_passed = self._risen_level() not in (None, _level_of(job))
        self._num_passed = self._num_passed + 1 if is_passed else 0
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
        for order in self._levels.values():
            order.release(worker_id)

    def _orders(self) -> Iterator[PrefixOrder]:
        risen = self._risen_level() if self._num_passed >= MAX_PASSED else None
        if risen is None:
            yield from self._levels.values()
            return
        num_requeued = self._num_requeued_levels()
        first = [*self._levels.keys()[:num_requeued], risen]
        yield from (self._levels[level] for level in first)
        yield from (order for level, order in self._levels.items() if level not in first)

    def _risen_level(self) -> _Level | None:
        """The level that is to get a turn although another one is ahead of it."""
        num_requeued = self._num_requeued_levels()
        if len(self._levels) < num_requeued + 2:
            return None
        first = self._levels.keys()[num_requeued]
        job = self._ageing.risen(first[1], self.now)
        return None if job is None else _level_of(job)

    def _num_requeued_levels(self) -> int:
        return int(self._levels.bisect_left((True, -(2**31))))
