"""Which worker's prefix cache probably holds which prefixes."""

from collections import OrderedDict

from tidemill.protocol.prefix import ROUTING_HASH_BYTES


class _Shadow:
    """The routing hashes one worker was given last, as many as its cache can hold."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.hashes: OrderedDict[bytes, None] = OrderedDict()


class Residency:
    """A shadow of the workers' prefix caches, made of what was dispatched to them.

    It is a guess that costs no messages: a wrong one costs a prefill, never correctness.
    """

    def __init__(self) -> None:
        self._shadows: dict[str, _Shadow] = {}
        self._last_holder: dict[bytes, str] = {}

    def add_worker(self, worker_id: str, capacity: int) -> None:
        """Follow a worker whose cache holds ``capacity`` routing blocks."""
        self._shadows[worker_id] = _Shadow(capacity)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and what it held."""
        for routing_hash in self._shadows.pop(worker_id).hashes:
            self._forget_holder(routing_hash, worker_id)

    def depth(self, worker_id: str, key: bytes) -> int:
        """Return how many leading hashes of ``key`` the worker holds.

        A binary search: tails leave a cache before what they hang on, so holdings are
        prefix-closed.
        """
        hashes = self._shadows[worker_id].hashes
        low, high = 0, len(key) // ROUTING_HASH_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if _hash_at(key, middle) in hashes:
                low = middle
            else:
                high = middle - 1
        return low

    def holder(self, key: bytes, depth: int) -> str | None:
        """Return the worker that last got a job sharing the first ``depth`` hashes of ``key``."""
        if len(key) < depth * ROUTING_HASH_BYTES:
            return None
        return self._last_holder.get(_hash_at(key, depth))

    def dispatched(self, worker_id: str, key: bytes) -> None:
        """Note that the worker will hold the prefixes of ``key``."""
        shadow = self._shadows[worker_id]
        # Deepest first, so that the tail is the least recently used and leaves first.
        for depth in range(len(key) // ROUTING_HASH_BYTES, 0, -1):
            routing_hash = _hash_at(key, depth)
            shadow.hashes[routing_hash] = None
            shadow.hashes.move_to_end(routing_hash)
            self._last_holder[routing_hash] = worker_id
        while len(shadow.hashes) > shadow.capacity:
            evicted, _ = shadow.hashes.popitem(last=False)
            self._forget_holder(evicted, worker_id)

    def _forget_holder(self, routing_hash: bytes, worker_id: str) -> None:
        if self._last_holder.get(routing_hash) == worker_id:
            del self._last_holder[routing_hash]


def _hash_at(key: bytes, depth: int) -> bytes:
    return key[(depth - 1) * ROUTING_HASH_BYTES : depth * ROUTING_HASH_BYTES]
