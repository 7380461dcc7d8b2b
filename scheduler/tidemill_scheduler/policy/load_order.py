"""Workers by load, without looking at all of them each time."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

#: Up to so many workers are all looked at.
_EXACT_SIZE = 16

#: Loads that are looked up anew whenever the least loaded ones are asked for.
_NUM_REFRESHED = 4

#: Loads that turn out to have grown are put back up to so many times for one question.
_MAX_TRIES = 32


class LoadOrder:
    """Finds the least loaded workers; ``load_of`` tells the load of one.

    A load that has grown unnoticed is seen when it comes to the top.  One that has shrunk is seen
    when the caller says so, or in its turn: every question looks at a few workers in rotation.
    """

    def __init__(self, load_of: Callable[[str], float]) -> None:
        self._load_of = load_of
        self._loads: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._rotation: list[str] = []
        self._cursor = 0

    def add(self, worker_id: str) -> None:
        """Take in a worker."""
        self._loads[worker_id] = self._load_of(worker_id)
        self._rotation.append(worker_id)
        if len(self._loads) == _EXACT_SIZE + 1:
            # Until now nobody took note of any changes.
            self._loads = {i: self._load_of(i) for i in self._loads}
            self._rebuild()
        elif not self._is_small:
            self._push(worker_id)

    def remove(self, worker_id: str) -> None:
        """Forget a worker, in time proportional to the number of workers; raises ``KeyError``."""
        del self._loads[worker_id]
        self._rotation.remove(worker_id)

    def changed(self, worker_id: str) -> None:
        """Look at a worker's load again; raises ``KeyError``."""
        if self._is_small:
            return
        load = self._load_of(worker_id)
        if load != self._loads[worker_id]:
            self._loads[worker_id] = load
            self._push(worker_id)

    def least(self, count: int) -> list[str]:
        """Return up to ``count`` workers, the least loaded first."""
        if self._is_small:
            return sorted(self._loads, key=lambda i: (self._load_of(i), i))[:count]
        self._refresh()
        found: list[str] = []
        for _ in range(_MAX_TRIES):
            if len(found) == count or not self._heap:
                break
            load, worker_id = heappop(self._heap)
            if self._loads.get(worker_id) != load or worker_id in found:
                continue
            self.changed(worker_id)
            if self._loads[worker_id] <= load:
                found.append(worker_id)
        for worker_id in found:
            self._push(worker_id)
        return found or sorted(self._loads, key=self._loads.__getitem__)[:count]

    def _refresh(self) -> None:
        for _ in range(_NUM_REFRESHED):
            self._cursor = (self._cursor + 1) % len(self._rotation)
            self.changed(self._rotation[self._cursor])

    @property
    def _is_small(self) -> bool:
        return len(self._loads) <= _EXACT_SIZE

    def _push(self, worker_id: str) -> None:
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._rebuild()
        else:
            heappush(self._heap, (self._loads[worker_id], worker_id))

    def _rebuild(self) -> None:
        self._heap = [(load, worker_id) for worker_id, load in self._loads.items()]
        heapify(self._heap)
