"""The scheduler's part in KV events, as naively as possible."""

from tidemill.protocol.messages import KvEvents
from tidemill.protocol.prefix import ROUTING_HASH_BYTES


def split(digests: bytes) -> list[bytes]:
    """Return the single routing hashes."""
    size = ROUTING_HASH_BYTES
    return [digests[start : start + size] for start in range(0, len(digests), size)]


class KvReader:
    """Replays batches of events and complains about each one that makes no sense."""

    def __init__(self) -> None:
        self.seq = 0
        self.digests: set[bytes] = set()

    def apply(self, events: KvEvents) -> None:
        """Take the next batch."""
        assert events.seq == self.seq + 1, f"batch {events.seq} follows {self.seq}"
        self.seq = events.seq
        for digest in split(events.stored):
            assert digest not in self.digests, "stored twice"
            self.digests.add(digest)
        for digest in split(events.evicted):
            assert digest in self.digests, "evicted, but never stored"
            self.digests.remove(digest)
