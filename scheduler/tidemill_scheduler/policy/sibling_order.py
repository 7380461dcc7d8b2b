"""The jobs of the interactive lane in prefix order, to find those that share a beginning."""

from collections.abc import Iterator

from sortedcontainers import SortedList

from tidemill_scheduler.policy.bound_job import BoundJob


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

    def nearest(self, bound: BoundJob, limit: int) -> list[BoundJob]:
        """Return the neighbours of a job that is here, up to ``limit`` on each side."""
        if not bound.key:
            return []
        place = self._place(bound)
        low, high = max(0, place - limit), place + limit + 1
        return [entry[2] for entry in self._entries.islice(low, high) if entry[2] is not bound]

    def sides(self, bound: BoundJob, limit: int) -> Iterator[Iterator[BoundJob]]:
        """Yield up to ``limit`` jobs after one that is here, then those before it, nearest first.

        Nothing may be added or removed meanwhile.
        """
        if not bound.key:
            return
        place = self._place(bound)
        after = self._entries.islice(place + 1, place + 1 + limit)
        before = self._entries.islice(max(0, place - limit), place, reverse=True)
        for entries in (after, before):
            yield (entry[2] for entry in entries)

    def _place(self, bound: BoundJob) -> int:
        return int(self._entries.bisect_left((bound.key, bound.number)))
