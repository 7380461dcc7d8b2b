"""The routing hashes that a worker's prefix cache holds, and what changed of them."""

from itertools import islice

from tidemill.protocol.messages import KvEvents, KvSnapshot
from tidemill.protocol.prefix import ROUTING_HASH_BYTES

#: Hashes of one batch of events, 256 KiB; what is beyond goes into the next batch.
MAX_BATCH_HASHES = 32_768


class RoutingIndex:
    """Every fourth block hash of each cached chain, by its first eight bytes.

    Noting a change costs a dict and a set operation; what really changed is worked out when
    ``collect`` is asked for it.  So a hash that came and went in between is in no batch, and any
    number of steps may pass between two batches without one of their changes being lost.  Two
    block hashes that agree in eight bytes would be taken for one.
    """

    def __init__(self) -> None:
        self._hashes: dict[bytes, bytes] = {}
        self._changed: set[bytes] = set()
        self._told: set[bytes] = set()
        #: Number of the last batch.
        self.seq = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, digest: bytes) -> bytes | None:
        """Return the cached block hash that begins with ``digest``."""
        return self._hashes.get(digest)

    def add(self, block_hash: bytes) -> None:
        """Note that blocks with this routing hash can be found from now on."""
        digest = block_hash[:ROUTING_HASH_BYTES]
        self._hashes[digest] = block_hash
        self._changed.add(digest)

    def discard(self, block_hash: bytes) -> None:
        """Note that no block with this hash is left; hashes not for routing are passed over."""
        digest = block_hash[:ROUTING_HASH_BYTES]
        if self._hashes.get(digest) == block_hash:
            del self._hashes[digest]
            self._changed.add(digest)

    def collect(self) -> KvEvents | None:
        """Return the next batch: the changes since the last one; None without any."""
        stored, evicted = bytearray(), bytearray()
        for digest in self._take_changed():
            if digest in self._hashes:
                if digest not in self._told:
                    self._told.add(digest)
                    stored += digest
            elif digest in self._told:
                self._told.remove(digest)
                evicted += digest
        if not stored and not evicted:
            return None
        self.seq += 1
        return KvEvents(seq=self.seq, stored=bytes(stored), evicted=bytes(evicted))

    def snapshot(self) -> KvSnapshot:
        """Return everything that the batches so far told of."""
        return KvSnapshot(seq=self.seq, digests=b"".join(self._told))

    def _take_changed(self) -> set[bytes]:
        if len(self._changed) <= MAX_BATCH_HASHES:
            taken, self._changed = self._changed, set()
        else:
            taken = set(islice(self._changed, MAX_BATCH_HASHES))
            self._changed -= taken
        return taken
