"""The jobs that are under way to workers or run there, in prefix order."""

from collections.abc import Iterator

from sortedcontainers import SortedList

from tidemill_scheduler.policy.routing_hashes import prefix_of, shared_depth

#: Jobs that are looked at on each side of a key.
_MAX_LOOKED_AT = 256


class InFlight:
    """Answers where jobs with a common prefix are; a job costs the same however long its key is."""

    def __init__(self) -> None:
        # (routing key, worker's slot).
        self._jobs: SortedList[tuple[bytes, int]] = SortedList()

    def add(self, key: bytes, slot: int) -> None:
        """Note a job that is sent."""
        self._jobs.add((key, slot))

    def remove(self, key: bytes, slot: int) -> None:
        """Forget a job; raises ``ValueError``."""
        self._jobs.remove((key, slot))

    def depths(self, key: bytes, least_depth: int, limit: int) -> dict[int, int]:
        """Return up to ``limit`` workers on each side with jobs that share so many hashes.

        By slot, with the depth of the best of its jobs; of very many jobs those next to the key.
        """
        depths: dict[int, int] = {}
        position = self._jobs.bisect_left((key, -1))
        upper = self._jobs.islice(position, position + _MAX_LOOKED_AT)
        lower = self._jobs.islice(max(0, position - _MAX_LOOKED_AT), position, reverse=True)
        for side in (upper, lower):
            for slot, depth in self._deepest(side, key, least_depth, limit):
                depths[slot] = max(depth, depths.get(slot, 0))
        return depths

    def first_with(self, key: bytes, depth: int) -> int | None:
        """Return the slot of a worker with a job that shares the first ``depth`` hashes."""
        prefix = prefix_of(key, depth)
        position = self._jobs.bisect_left((prefix, -1))
        if position == len(self._jobs):
            return None
        other, slot = self._jobs[position]
        return slot if other.startswith(prefix) else None

    def _deepest(
        self, side: Iterator[tuple[bytes, int]], key: bytes, least_depth: int, limit: int
    ) -> Iterator[tuple[int, int]]:
        # The farther from the key, the less is shared, so that a worker's first job is its best.
        seen: set[int] = set()
        for other, slot in side:
            if slot in seen:
                continue
            depth = shared_depth(other, key)
            if depth < least_depth or len(seen) == limit:
                return
            seen.add(slot)
            yield slot, depth
