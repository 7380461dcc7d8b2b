"""A worker's paged KV cache with prefix reuse, at the grain of routing hashes."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.simulation.idle_hashes import IdleHashes, pop_first

#: Share of the blocks that idle prefixes may take before what only batch sequences held.
WATCHED_SHARE = 0.5


class KvCache:
    """Counts references to shared blocks and evicts the least recently used, leaves first.

    The unit of capacity is a KV block.  A routing hash stands for ``ROUTING_STRIDE`` of them and is
    found, kept and evicted as one; blocks without a hash (output, the rest of a prompt) are only
    counted.  What only batch sequences held leaves before what somebody waited for, see
    ``IdleHashes``, and hashes up to one that was hinted leave last.  What is held is prefix-closed:
    whoever holds a hash holds those before it.
    """

    __slots__ = (
        "_evicted",
        "_hinted",
        "_idle",
        "_kept",
        "_protected",
        "_references",
        "_stored",
        "capacity",
        "num_pinned",
        "version",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: KV blocks that sequences hold.
        self.num_pinned = 0
        #: Rises whenever a hash becomes findable or stops being so.
        self.version = 0
        # How many sequences hold each hash that is here: 0 for those that are idle.
        self._references: dict[int, int] = {}
        self._idle = IdleHashes(int(WATCHED_SHARE * capacity) // ROUTING_STRIDE)
        # Idle hashes that jobs wait for: by the hinted one, the chain up to it once it was seen.
        self._kept: dict[int, None] = {}
        self._hinted: dict[int, tuple[int, ...]] = {}
        self._protected: set[int] = set()
        self._stored: list[int] = []
        self._evicted: list[int] = []

    @property
    def num_free(self) -> int:
        """KV blocks that no sequence holds."""
        return self.capacity - self.num_pinned

    def hint(self, references: Mapping[int, int]) -> None:
        """Take in for how many waiting jobs a hash is the end of what they share; 0 for none."""
        for digest, count in references.items():
            if count:
                self._hinted.setdefault(digest, ())
            else:
                self._hinted.pop(digest, None)
        self._protected = {digest for chain in self._hinted.values() for digest in chain}
        for digest in [digest for digest in self._kept if digest not in self._protected]:
            del self._kept[digest]
            self._idle.add((digest,))

    def find(self, chain: Sequence[int], near: int = 0) -> int:
        """Return how many leading hashes of a chain are here; a binary search.

        ``near``, a number of its hashes, is a guess that saves look-ups where it is right.
        """
        references = self._references
        low, high = 0, len(chain)
        if near and chain[near - 1] not in references:
            high = near - 1
        elif near == high or chain[near] not in references:
            return near
        else:
            low = near + 1
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in references:
                low = middle + 1
            else:
                high = middle
        return low

    def count_new(self, chain: Sequence[int], depth: int, num_blocks: int) -> int:
        """Return by how much ``reserve`` would raise ``num_pinned``."""
        references = self._references
        low, high = 0, depth
        while low < high:
            middle = (low + high) // 2
            if references[chain[middle]]:
                low = middle + 1
            else:
                high = middle
        return num_blocks - low * ROUTING_STRIDE

    def reserve(self, chain: Sequence[int], depth: int, num_new: int) -> None:
        """Hold the first ``depth`` hashes of a chain, which are here, and blocks to be filled.

        ``num_new`` is what ``count_new`` said.
        """
        references = self._references
        for digest in chain[:depth]:
            count = references[digest]
            if not count:
                self._wake(digest)
            references[digest] = count + 1
        self.num_pinned += num_new
        self._evict()

    def publish(self, digests: Sequence[int]) -> None:
        """Make reserved blocks findable; of content that is here twice one copy is given back."""
        if digests[0] not in self._references:
            # What hangs on a hash that is not here is not here either.
            references = self._references
            for digest in digests:
                references[digest] = 1
            self._stored.extend(digests)
        else:
            self._publish_known(digests)
        self.version += 1

    def free(self, held: Sequence[int], num_unpublished: int, *, is_batch: bool = False) -> None:
        """Let go of a sequence's hashes, the last first, and of its other blocks."""
        references = self._references
        if not is_batch:
            self._idle.mark(held)
        # Counts never rise along a chain, so those that nobody else holds are its end.
        low, high = 0, len(held)
        while low < high:
            middle = (low + high) // 2
            if references[held[middle]] > 1:
                low = middle + 1
            else:
                high = middle
        for digest in held[:low]:
            references[digest] -= 1
        tail = held[low:]
        for digest in tail:
            references[digest] = 0
        if self._hinted:
            self._rest_hinted(held, tail)
        else:
            self._idle.add(tail)
        self.num_pinned -= num_unpublished + len(tail) * ROUTING_STRIDE

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return and forget the hashes (stored, evicted) since the last call.

        None is in both: what came and went is not told, what went and came back is stored.
        """
        stored, evicted = self._stored, self._evicted
        self._stored, self._evicted = [], []
        if stored and evicted:
            both = set(stored).intersection(evicted)
            if both:
                stored = [d for d in stored if d not in both or d in self._references]
                evicted = [d for d in evicted if d not in both]
        return stored, evicted

    def digests(self) -> list[int]:
        """Return all hashes that are held."""
        return list(self._references)

    def _rest_hinted(self, held: Sequence[int], tail: Sequence[int]) -> None:
        for digest in self._hinted:
            if not self._hinted[digest] and digest in held:
                chain = tuple(held[: held.index(digest) + 1])
                self._hinted[digest] = chain
                self._protected.update(chain)
        if not tail or tail[0] not in self._protected:
            self._idle.add(tail)
            return
        # A chain is protected from its beginning.
        split = bisect_left(tail, True, key=lambda digest: digest not in self._protected)
        self._idle.add(tail[split:])
        self._kept.update(dict.fromkeys(reversed(tail[:split])))

    def _wake(self, digest: int) -> None:
        if digest in self._idle:
            self._idle.remove(digest)
        else:
            del self._kept[digest]

    def _publish_known(self, digests: Sequence[int]) -> None:
        references = self._references
        for digest in digests:
            count = references.get(digest)
            references[digest] = (count or 0) + 1
            if count is None:
                self._stored.append(digest)
            elif count:
                self.num_pinned -= ROUTING_STRIDE
            else:
                self._wake(digest)

    def _evict(self) -> None:
        num_idle = len(self._idle) + len(self._kept)
        excess = self.num_pinned + num_idle * ROUTING_STRIDE - self.capacity
        if excess > 0:
            count = -(-excess // ROUTING_STRIDE)
            evicted = self._idle.pop(count)
            if len(evicted) < count:
                evicted += self._pop_kept(count - len(evicted))
            references = self._references
            for digest in evicted:
                del references[digest]
            self._evicted += evicted
            self.version += 1

    def _pop_kept(self, count: int) -> list[int]:
        popped = pop_first(self._kept, count)
        self._idle.forget(popped)
        return popped
