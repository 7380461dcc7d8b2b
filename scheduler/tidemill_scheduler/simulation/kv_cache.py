"""A worker's paged KV cache with prefix reuse, at the grain of routing hashes."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from tidemill.protocol.prefix import ROUTING_STRIDE


class KvCache:
    """Counts references to shared blocks and evicts the least recently used, leaves first.

    The unit of capacity is a KV block.  A routing hash stands for ``ROUTING_STRIDE`` of them and is
    found, kept and evicted as one; blocks without a hash (output, the rest of a prompt) are only
    counted.  What is held is prefix-closed: whoever holds a hash holds those before it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: KV blocks that sequences hold.
        self.num_pinned = 0
        #: Rises whenever a hash becomes findable or stops being so.
        self.version = 0
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._stored: list[int] = []
        self._evicted: list[int] = []

    @property
    def num_free(self) -> int:
        """KV blocks that no sequence holds."""
        return self.capacity - self.num_pinned

    def find(self, chain: Sequence[int]) -> int:
        """Return how many leading hashes of a chain are held; a binary search."""
        references, idle = self._references, self._idle
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            digest = chain[middle]
            if digest in references or digest in idle:
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
            if chain[middle] in references:
                low = middle + 1
            else:
                high = middle
        return num_blocks - low * ROUTING_STRIDE

    def reserve(self, chain: Sequence[int], depth: int, num_new: int) -> None:
        """Hold the first ``depth`` hashes of a chain, which are here, and blocks to be filled.

        ``num_new`` is what ``count_new`` said.
        """
        references, idle = self._references, self._idle
        for digest in chain[:depth]:
            count = references.get(digest)
            if count is None:
                del idle[digest]
                references[digest] = 1
            else:
                references[digest] = count + 1
        self.num_pinned += num_new
        self._evict()

    def publish(self, digests: Sequence[int]) -> None:
        """Make reserved blocks findable; of content that is here twice one copy is given back."""
        references = self._references
        if digests[0] not in references and digests[0] not in self._idle:
            # Nobody holds what hangs on a hash that is not here.
            references.update(dict.fromkeys(digests, 1))
            self._stored.extend(digests)
        else:
            self._publish_known(digests)
        self.version += 1

    def free(self, held: Sequence[int], num_unpublished: int) -> None:
        """Let go of a sequence's hashes, the last first, and of its other blocks."""
        references = self._references
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
        deque(map(references.__delitem__, tail), maxlen=0)
        self._idle.update(dict.fromkeys(reversed(tail)))
        self.num_pinned -= num_unpublished + len(tail) * ROUTING_STRIDE

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return and forget the hashes (stored, evicted) since the last call.

        None is in both: what came and went is not told, what went and came back is stored.
        """
        stored, evicted = self._stored, self._evicted
        self._stored, self._evicted = [], []
        if stored and evicted:
            both = set(stored) & set(evicted)
            if both:
                stored = [d for d in stored if d not in both or self.find((d,))]
                evicted = [d for d in evicted if d not in both]
        return stored, evicted

    def digests(self) -> list[int]:
        """Return all hashes that are held."""
        return [*self._references, *self._idle]

    def _publish_known(self, digests: Sequence[int]) -> None:
        references, idle = self._references, self._idle
        for digest in digests:
            count = references.get(digest)
            if count is not None:
                references[digest] = count + 1
                self.num_pinned -= ROUTING_STRIDE
            elif digest in idle:
                del idle[digest]
                references[digest] = 1
            else:
                references[digest] = 1
                self._stored.append(digest)

    def _evict(self) -> None:
        excess = self.num_pinned + len(self._idle) * ROUTING_STRIDE - self.capacity
        if excess > 0:
            pop = self._idle.popitem
            count = -(-excess // ROUTING_STRIDE)
            self._evicted += [pop(last=False)[0] for _ in range(count)]
            self.version += 1
