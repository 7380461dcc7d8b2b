"""What the daemon believes to be in one worker's prefix cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class WorkerCache:
    """Routing hashes of one worker: those it has, and the shadow of what is on its way to it.

    A worker that sends no events is *blind*: what arrived there is taken to be held, as many
    hashes as its cache has room for, the least recently used leaving first.
    """

    def __init__(self, slot: int, capacity_hashes: int) -> None:
        self.slot = slot
        #: The worker's bit in every index.
        self.bit = 1 << slot
        #: Number of the last batch of events that ``resident`` includes.
        self.seq = 0
        self.resident: set[bytes] = set()
        #: Jobs on their way by the hashes they will leave in the cache.
        self.shadow: dict[bytes, int] = {}
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

    def store(self, digests: Iterable[bytes]) -> list[bytes]:
        """Add what the cache has got; return what is new."""
        resident = self.resident
        fresh = [digest for digest in dict.fromkeys(digests) if digest not in resident]
        resident.update(fresh)
        return fresh

    def evict(self, digests: Iterable[bytes]) -> list[bytes]:
        """Remove what the cache has lost; return what it had of that."""
        resident = self.resident
        lost = [digest for digest in dict.fromkeys(digests) if digest in resident]
        resident.difference_update(lost)
        return lost

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

    def expect(self, digests: Iterable[bytes]) -> list[bytes]:
        """Count a job that is on its way; return the hashes it is the first to bring."""
        shadow, fresh = self.shadow, []
        for digest in digests:
            count = shadow.get(digest, 0)
            shadow[digest] = count + 1
            if not count:
                fresh.append(digest)
        return fresh

    def settle(self, digests: Iterable[bytes]) -> list[bytes]:
        """Uncount a job that was on its way; return the hashes that no other one brings."""
        shadow, gone = self.shadow, []
        for digest in digests:
            count = shadow.get(digest, 0)
            if count > 1:
                shadow[digest] = count - 1
            elif count:
                del shadow[digest]
                gone.append(digest)
        return gone
