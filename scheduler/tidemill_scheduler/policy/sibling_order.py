"""The jobs of the interactive lane in prefix order, to find those that share a beginning."""

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedList

from tidemill_scheduler.policy.bound_job import BoundJob
from tidemill_scheduler.policy.routing_hashes import shared_depth


class SiblingOrder:
    """Jobs sorted by key and then by number; the closer two are, the more they share."""

    def __init__(self) -> None:
        self._entries: SortedList[tuple[bytes, int, BoundJob]] = SortedList()

    def add(self, bound: BoundJob) -> None:
        """Take in a job; one without a key has no siblings."""
        if bound.key:
            self._entries.add((bound.key, bound.number, bound))

    def remove(self, bound: BoundJob) -> None:
        """Forget a job; raises ``ValueError`` for one that is not here."""
        if bound.key:
            self._entries.remove((bound.key, bound.number, bound))

    def around(self, bound: BoundJob, limit: int) -> Iterator[Iterator[tuple[BoundJob, int]]]:
        """Yield the job's neighbours after it, then those before it, the nearest first.

        Up to ``limit`` each with the number of hashes that they share with it, at least one.
        Nothing may be added or removed meanwhile.
        """
        if not bound.key or not self._entries:
            return
        place = self._entries.bisect_left((bound.key, bound.number))
        after = self._entries.islice(place)
        before = self._entries.islice(0, place, reverse=True)
        for entries in (after, before):
            yield _sharing(bound, (entry[2] for entry in entries), limit)


def _sharing(
    bound: BoundJob, neighbours: Iterator[BoundJob], limit: int
) -> Iterator[tuple[BoundJob, int]]:
    others = (other for other in neighbours if other is not bound)
    for other in islice(others, limit):
        depth = shared_depth(bound.key, other.key)
        if not depth:
            return
        yield other, depth
