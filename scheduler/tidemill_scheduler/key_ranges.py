"""Who walks which part of the prefix order."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from tidemill_scheduler.jobs import SortKey

#: Sorts before every job.
LOWEST: SortKey = (b"", -1, -1, "")


@dataclass(slots=True)
class KeyRange:
    """The jobs from ``low`` up to the next range's ``low``; ``count`` of them wait."""

    low: SortKey
    owner: str | None = None
    count: int = 0


class KeyRanges:
    """A partition of all sort keys into ranges, at most one for each worker.

    ```
    LOWEST        b                 c                    e
      |--- none ---|---- worker 7 ---|----- worker 2 -----|--- worker 5 --->
    ```
    """

    def __init__(self) -> None:
        self._ranges = [KeyRange(LOWEST)]
        self._owned: dict[str, KeyRange] = {}

    def __iter__(self) -> Iterator[KeyRange]:
        return iter(self._ranges)

    def find(self, key: SortKey) -> KeyRange:
        """Return the range that holds ``key``."""
        return self._ranges[self._position(key)]

    def owned_by(self, worker_id: str) -> KeyRange | None:
        """Return the worker's range, if it has one."""
        return self._owned.get(worker_id)

    def assign(self, key_range: KeyRange, worker_id: str) -> None:
        """Give a range to a worker, in place of the one it had."""
        self.release(worker_id)
        if key_range.owner is not None:
            del self._owned[key_range.owner]
        key_range.owner = worker_id
        self._owned[worker_id] = key_range

    def split(self, key_range: KeyRange, low: SortKey, count: int) -> KeyRange:
        """Cut the upper part of a range, with ``count`` jobs from ``low`` on, off as a new one."""
        upper = KeyRange(low, count=count)
        key_range.count -= count
        self._ranges.insert(self._position(key_range.low) + 1, upper)
        return upper

    def release(self, worker_id: str) -> None:
        """Take a worker's range from it; an empty one becomes part of its neighbour."""
        key_range = self._owned.pop(worker_id, None)
        if key_range is None:
            return
        key_range.owner = None
        if key_range.count == 0 and len(self._ranges) > 1:
            self._merge(self._position(key_range.low))

    def _merge(self, position: int) -> None:
        del self._ranges[position]
        if position == 0:
            self._ranges[0].low = LOWEST

    def _position(self, key: SortKey) -> int:
        return bisect_right(self._ranges, key, key=lambda key_range: key_range.low) - 1
