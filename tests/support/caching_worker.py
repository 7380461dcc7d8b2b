"""A worker's side of the story of its prefix cache: a set of hashes, and what it says of it."""

from collections.abc import Set

import redis

from tidemill.protocol import calls
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import run
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerStatus


class CachingWorker:
    """Tells of every change; writes a snapshot with every ``period``-th batch and the first."""

    def __init__(self, client: redis.Redis, worker_id: str, *, period: int = 256) -> None:
        self._client = client
        self._keys = ShardKeys()
        self.worker_id = worker_id
        self.held: set[bytes] = set()
        self._period = period
        self._seq = 0

    def change(self, stored: Set[bytes], evicted: Set[bytes] = frozenset()) -> None:
        """Store and evict in one batch, and report it."""
        self._seq += 1
        self.held = (self.held | stored) - evicted
        events = KvEvents(
            seq=self._seq, stored=b"".join(sorted(stored)), evicted=b"".join(sorted(evicted))
        )
        is_due = (self._seq - 1) % self._period == 0
        self.report(encode(events), self.snapshot() if is_due else b"")

    def snapshot(self) -> bytes:
        """All that it holds now."""
        return encode(KvSnapshot(seq=self._seq, digests=b"".join(sorted(self.held))))

    def report(self, events: bytes = b"", snapshot: bytes = b"", num_running: int = 0) -> None:
        """Write one entry."""
        status = WorkerStatus(num_running=num_running, free_blocks=4096)
        call = calls.report(
            self._keys,
            worker_id=self.worker_id,
            status=status,
            events=events,
            snapshot=snapshot,
        )
        run(self._client, call)
