"""One tenant's jobs that wait for one worker."""

import math
from collections.abc import Callable, Iterable, Iterator, ValuesView
from functools import partial
from itertools import islice

from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.lazy_heap import LazyHeap

#: Every so many picks the oldest job goes, and half-way in between the most urgent one.
PICKS_PER_TURN = 16

#: Up to so many jobs each is looked at for every pick.
EXACT_SIZE = 64

#: Prices that turn out to be outdated are looked up again up to so many times for one pick.
_MAX_TRIES = 16


class TenantQueue:
    """Picks by highest response ratio, in turns with the oldest and the most urgent job.

    The response ratio (Brinch Hansen 1971) lets short prefills go first without starving long ones
    as long as there is no overload.  Under any load one of ``PICKS_PER_TURN`` picks takes the
    oldest job, so the job at place p of the order of arrival is gone after
    ``PICKS_PER_TURN * p`` picks, whatever else comes.  Another one takes the job with the earliest
    latest start of those that would miss their deadline in the queue and can still make it.

    Beyond ``EXACT_SIZE`` jobs only the oldest ones of each bucket of nearly equal prefills are
    compared, and prices are looked up where they decide: ``reprice`` gives a job a new price if
    what its worker holds has changed, and leaves the old one otherwise.
    """

    def __init__(self, reprice: Callable[[BoundJob], None]) -> None:
        self._reprice = reprice
        self._jobs: dict[int, BoundJob] = {}
        self._by_age = LazyHeap[BoundJob](self._is_here)
        self._by_start = LazyHeap[BoundJob](self._is_startable)
        self._buckets: dict[int, LazyHeap[BoundJob]] = {}
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> ValuesView[BoundJob]:
        """All that wait, in no order."""
        return self._jobs.values()

    def add(self, bound: BoundJob) -> None:
        """Let a job wait here that has a price."""
        self._jobs[bound.number] = bound
        bound.is_hopeless = False
        self._by_age.push(bound.number, bound.number, bound)
        self.place(bound)

    def place(self, bound: BoundJob) -> None:
        """Put a job that waits here where its new price belongs."""
        bucket = self._buckets.get(bound.bucket)
        if bucket is None:
            is_current = partial(self._is_in_bucket, bound.bucket)
            bucket = self._buckets[bound.bucket] = LazyHeap[BoundJob](is_current)
        bucket.push(bound.job.since, bound.number, bound)
        if math.isfinite(bound.job.deadline):
            self._by_start.push(bound.latest_start, bound.number, bound)

    def remove(self, bound: BoundJob) -> None:
        """Take a job out; raises ``KeyError``."""
        del self._jobs[bound.number]

    def take(self, bound: BoundJob) -> None:
        """Take a job out as this queue's pick; raises ``KeyError``."""
        self.remove(bound)
        self._num_taken += 1

    def pick(self, now: float, ahead: float) -> BoundJob:
        """Return the next job, the same until something changes.

        ``ahead`` are the seconds of work at the worker; the queue must not be empty.
        """
        turn = self._num_taken % PICKS_PER_TURN
        chosen = None
        if turn == PICKS_PER_TURN - 1:
            chosen = self._by_age.first()
        elif turn == PICKS_PER_TURN // 2 - 1:
            chosen = self._most_urgent(now, ahead)
        return chosen or self._best_ratio(now)

    def samples(self, limit: int) -> Iterator[BoundJob]:
        """Yield up to ``limit`` jobs, with all lengths of prefill among them."""
        if len(self._jobs) <= limit:
            return iter(self._jobs.values())
        return islice(self._heads(), limit)

    def _most_urgent(self, now: float, ahead: float) -> BoundJob | None:
        for _ in range(EXACT_SIZE):
            bound = self._by_start.first()
            if bound is None or bound.latest_start >= now + ahead:
                return None
            if self._is_outdated(bound):
                continue
            if bound.latest_start > now:
                return bound
            # Out of reach; serving it first would make the next one miss its deadline as well.
            bound.is_hopeless = True
        return None

    def _best_ratio(self, now: float) -> BoundJob:
        if len(self._jobs) <= EXACT_SIZE:
            for bound in self._jobs.values():
                self._is_outdated(bound)
            return _highest(self._jobs.values(), now)
        for _ in range(_MAX_TRIES):
            best = _highest(self._heads(), now)
            # A lower price makes it no worse a choice.
            before = best.price.seconds
            if not self._is_outdated(best) or best.price.seconds <= before:
                break
        return best

    def _is_outdated(self, bound: BoundJob) -> bool:
        """Look a price up again; whether it was another one."""
        before = bound.price
        self._reprice(bound)
        if bound.price is before:
            return False
        self.place(bound)
        return True

    def _heads(self) -> Iterator[BoundJob]:
        for number, bucket in list(self._buckets.items()):
            head = bucket.first()
            if head is None:
                del self._buckets[number]
            else:
                yield head

    def _is_here(self, _order: float, bound: BoundJob) -> bool:
        return bound.number in self._jobs

    def _is_startable(self, order: float, bound: BoundJob) -> bool:
        is_here = bound.number in self._jobs
        return is_here and not bound.is_hopeless and order == bound.latest_start

    def _is_in_bucket(self, number: int, _order: float, bound: BoundJob) -> bool:
        return bound.bucket == number and bound.number in self._jobs


def _highest(jobs: Iterable[BoundJob], now: float) -> BoundJob:
    return max(jobs, key=lambda bound: (bound.ratio(now), -bound.number))
