"""Entries that must wait before they are tried again: pure, the clock is the caller's."""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush


class WaitingLine:
    """Holds entry ids in lanes; those of one lane keep their order, lanes do not wait for others.

    Times are seconds.  Each lane that was taken must be given back with what is left of it.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, deque[str]] = {}
        # Of every lane that is not taken, when it may be.
        self._due: list[tuple[float, str]] = []
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, lane: str) -> bool:
        return lane in self._lanes

    def num_in(self, lane: str) -> int:
        """Return how many entries wait in a lane."""
        return len(self._lanes.get(lane, ()))

    def holds(self, entry_id: str) -> bool:
        """Whether an entry waits here."""
        return entry_id in self._ids

    @property
    def next_at(self) -> float | None:
        """When a lane is due, at the earliest; None if none waits."""
        return self._due[0][0] if self._due else None

    def append(self, lane: str, entry_id: str) -> None:
        """Let an entry wait behind those of its lane; raises ``KeyError`` if there is none."""
        self._lanes[lane].append(entry_id)
        self._ids.add(entry_id)

    def put(self, lane: str, entry_ids: Sequence[str], until: float) -> None:
        """Let entries wait at the head of a new lane, or of one that was taken, until a time."""
        waiting = self._lanes.setdefault(lane, deque())
        waiting.extendleft(reversed(entry_ids))
        self._ids.update(entry_ids)
        if waiting:
            heappush(self._due, (until, lane))
        else:
            del self._lanes[lane]

    def take_due(self, now: float, limit: int) -> dict[str, list[str]]:
        """Take up to ``limit`` entries of lanes that are due."""
        taken: dict[str, list[str]] = {}
        while limit > 0 and self._due and self._due[0][0] <= now:
            _, lane = heappop(self._due)
            waiting = self._lanes[lane]
            taken[lane] = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
            limit -= len(taken[lane])
            self._ids.difference_update(taken[lane])
        return taken
