"""What the daemon believes to be in one worker's prefix cache."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence

from tidemill_scheduler.policy.routing_hashes import depth_within, share_depth, shared_depth


class WorkerCache:
    """Routing hashes that one worker has, and the keys of the jobs that bring it others.

    A worker that sends no events is *blind*: what arrived there is taken to be held, as many
    hashes as its cache has room for, the least recently used leaving first.
    """

    __slots__ = ("_capacity", "_recency", "bit", "in_flight", "resident", "seq", "slot")

    def __init__(self, slot: int, capacity_hashes: int) -> None:
        self.slot = slot
        #: The worker's bit in every index.
        self.bit = 1 << slot
        #: Number of the last batch of events that ``resident`` includes.
        self.seq = 0
        self.resident: set[bytes] = set()
        #: Keys of the jobs that are on their way or run there, sorted.
        self.in_flight: list[bytes] = []
        self._capacity = max(1, capacity_hashes)
        self._recency: OrderedDict[bytes, None] | None = OrderedDict()

    @property
    def is_blind(self) -> bool:
        """Whether it has never told what it holds."""
        return self._recency is not None

    def see(self) -> set[bytes]:
        """Stop guessing, for the worker tells; return what was guessed until now."""
        guessed: set[bytes] = set()
        if self._recency is not None:
            guessed, self.resident, self._recency = self.resident, set(), None
        return guessed

    def guess(self, digests: Sequence[bytes]) -> list[bytes]:
        """Mark hashes of one chain as used last; return what the cache has no room for."""
        if self._recency is None:
            return []
        # Deepest first, so that the tail is the least recently used and leaves first.
        for digest in reversed(digests):
            self._recency[digest] = None
            self._recency.move_to_end(digest)
        num_over = len(self._recency) - self._capacity
        return [self._recency.popitem(last=False)[0] for _ in range(num_over)]

    def expect(self, key: bytes) -> None:
        """Note a job that is on its way."""
        insort(self.in_flight, key)

    def settle(self, key: bytes) -> bool:
        """Forget a job that was on its way; false if it was not."""
        position = bisect_left(self.in_flight, key)
        if position == len(self.in_flight) or self.in_flight[position] != key:
            return False
        del self.in_flight[position]
        return True

    def depth(self, key: bytes, near: int | None = None) -> int:
        """Return how many leading hashes of ``key`` are there or on their way."""
        in_flight, shared = self.in_flight, 0
        position = bisect_left(in_flight, key)
        # Jobs go out in prefix order: mostly the one before has more of a key than the one behind.
        if position:
            shared = shared_depth(key, in_flight[position - 1])
        if position < len(in_flight) and share_depth(key, in_flight[position], shared + 1):
            shared = shared_depth(key, in_flight[position], shared + 1)
        # Mostly a cache holds no more of a key than the nearest of the jobs that bring it.
        return depth_within(key, self.resident, shared, shared if near is None else near)
