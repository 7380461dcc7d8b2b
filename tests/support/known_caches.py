"""What a scheduler is told of its workers, written down instead of acted on."""

from collections import defaultdict

from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerStatus
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.policy.scheduler import Scheduler


def digests_in(data: bytes) -> set[bytes]:
    """Cut concatenated routing hashes."""
    size = ROUTING_HASH_BYTES
    return {data[i : i + size] for i in range(0, len(data), size)}


class CacheRecorder(Scheduler):
    """Holds each worker's cache as a set of hashes, and all of its statuses.

    Fails when events come out of their order: whoever feeds it must have seen that first.
    """

    def __init__(self) -> None:
        super().__init__(silent_seconds=60.0)
        self.caches: dict[str, set[bytes]] = {}
        self.seqs: dict[str, int] = {}
        self.statuses: defaultdict[str, list[WorkerStatus]] = defaultdict(list)
        self.num_resets = 0

    def apply_kv(self, worker_id: str, events: KvEvents) -> bool:
        """Add and remove."""
        assert events.seq == self.seqs.get(worker_id, 0) + 1, "a gap was not noticed"
        self.seqs[worker_id] = events.seq
        cache = self.caches.setdefault(worker_id, set())
        cache |= digests_in(events.stored)
        cache -= digests_in(events.evicted)
        return True

    def reset_kv(self, worker_id: str, snapshot: KvSnapshot) -> None:
        """Begin anew."""
        self.num_resets += 1
        self.seqs[worker_id] = snapshot.seq
        self.caches[worker_id] = digests_in(snapshot.digests)

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        """Keep the status."""
        super().update_worker(worker_id, status, now)
        self.statuses[worker_id].append(status)
