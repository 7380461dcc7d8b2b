"""What workers should keep in their prefix caches for jobs that are about to come."""

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.policy.lanes import AnyLanes
from tidemill_scheduler.policy.prefix_list import shared_depth


@dataclass(frozen=True, slots=True)
class Hint:
    """Waiting jobs of a worker by the routing hash that their shared prefixes end in; 0 for none.

    A worker evicts first what nobody waits for.
    """

    worker_id: str
    refs: Mapping[bytes, int]


class Hints:
    """Notes, for each worker, the group that it walks in the batch lane."""

    def __init__(self, lanes: AnyLanes, group_depth: int) -> None:
        self._lanes = lanes
        self._group_depth = group_depth
        # Worker id -> where its group's prefix ends.
        self._current: dict[str, bytes] = {}
        self._pending: dict[str, dict[bytes, int]] = {}

    def dispatched(self, job: WaitingJob, worker_id: str) -> None:
        """Note that a job went to a worker: has it more of the same prefix to come?"""
        following = self._lanes.follower(job, worker_id)
        anchor, refs = b"", 0
        if following is not None:
            next_job, order = following
            depth = shared_depth(job.key, next_job.key)
            if depth - job.hint_depth >= self._group_depth:
                end = depth * ROUTING_HASH_BYTES
                anchor = job.key[end - ROUTING_HASH_BYTES : end]
                is_new = anchor != self._current.get(worker_id)
                refs = order.followers(worker_id, depth) if is_new else 0
        self._walk(worker_id, anchor, refs)

    def forget(self, worker_id: str) -> None:
        """Forget a worker."""
        self._current.pop(worker_id, None)
        self._pending.pop(worker_id, None)

    def take(self) -> list[Hint]:
        """Return what changed since the last time."""
        hints = [Hint(worker_id, refs) for worker_id, refs in self._pending.items()]
        self._pending = {}
        return hints

    def _walk(self, worker_id: str, anchor: bytes, refs: int) -> None:
        known = self._current.get(worker_id, b"")
        if anchor == known:
            return
        changes = self._pending.setdefault(worker_id, {})
        if known:
            changes[known] = 0
        if anchor:
            changes[anchor] = refs
            self._current[worker_id] = anchor
        else:
            del self._current[worker_id]
