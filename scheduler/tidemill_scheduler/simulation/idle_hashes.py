"""Hashes in a simulated cache that no sequence holds, in the order in which they are evicted."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice


class IdleHashes:
    """Least recently used first, but those that only batch sequences held before all others.

    A hash that somebody waited for is *watched*.  At most ``most_watched`` idle ones are so: what
    is beyond falls back, the least recently used first, and is then evicted as if a batch sequence
    had let go of it at that moment.  So cold prefixes take no more than that from batch work, and
    without batch sequences nothing but the last use counts.

    Watched hashes begin their chains: who holds a hash holds those before it.
    """

    def __init__(self, most_watched: int) -> None:
        self._most_watched = most_watched
        self._batch: dict[int, None] = {}
        self._watched: dict[int, None] = {}
        # Idle or not: what was watched when it was let go of, and did not fall back since.
        self._marks: set[int] = set()

    def __len__(self) -> int:
        return len(self._batch) + len(self._watched)

    def __contains__(self, digest: int) -> bool:
        return digest in self._batch or digest in self._watched

    def mark(self, digests: Sequence[int]) -> None:
        """Note that these, a chain from its beginning, are watched from now on."""
        self._marks.update(digests)

    def add(self, tail: Sequence[int]) -> None:
        """Take in the end of a chain, its last hash to be evicted first."""
        marks = self._marks
        if marks:
            split = bisect_left(tail, True, key=lambda digest: digest not in marks)
            self._watched.update(dict.fromkeys(reversed(tail[:split])))
            tail = tail[split:]
        batch = self._batch
        for digest in reversed(tail):
            batch[digest] = None
        self._fall_back()

    def remove(self, digest: int) -> None:
        """Take out one that is held again."""
        del (self._batch if digest in self._batch else self._watched)[digest]

    def pop(self, count: int) -> list[int]:
        """Take out those that are evicted next, all if there are no more than ``count``."""
        num_batch = min(count, len(self._batch))
        popped = pop_first(self._batch, num_batch)
        if count > num_batch:
            watched = pop_first(self._watched, count - num_batch)
            self._marks.difference_update(watched)
            popped += watched
        return popped

    def forget(self, digests: Sequence[int]) -> None:
        """Note that these, evicted from elsewhere, are watched no more."""
        self._marks.difference_update(digests)

    def _fall_back(self) -> None:
        num_over = len(self._watched) - self._most_watched
        if num_over > 0:
            fallen = pop_first(self._watched, num_over)
            self._marks.difference_update(fallen)
            self._batch.update(dict.fromkeys(fallen))


def pop_first(ordered: dict[int, None], count: int) -> list[int]:
    """Take out the ``count`` keys that came first."""
    # All at once: whatever was deleted at the front of a dict is passed over again each time.
    popped = list(islice(ordered, count))
    for digest in popped:
        del ordered[digest]
    return popped
