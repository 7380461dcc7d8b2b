"""What workers should keep in their prefix caches for jobs that are about to come."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.lanes import AnyLanes
from tidemill_scheduler.policy.routing_hashes import shared_depth

#: Groups of one worker that are followed at a time, those served last.
MAX_WALKS = 8


@dataclass(frozen=True, slots=True)
class Hint:
    """Waiting jobs of a worker by the routing hash that their shared prefixes end in; 0 for none.

    A worker evicts first what nobody waits for.
    """

    worker_id: str
    refs: Mapping[bytes, int]


class _Walk(NamedTuple):
    """The last job of a line that went to a worker, and where the prefix of its group ends.

    That is after its hash ``anchor``, of so many hashes in all.
    """

    job: WaitingJob
    anchor: bytes
    depth: int


@dataclass(slots=True)
class _Hinted:
    """One worker's groups by priority and tenant, and tokens it computed since they were told."""

    walks: dict[tuple[int, str], _Walk] = field(default_factory=dict)
    tokens: int = 0


class Hints:
    """Notes, for each worker, the groups that it walks in the batch lane.

    Hints lapse in a worker that has turned its cache over a few times, lest those of a leader that
    is gone stay; so they are repeated whenever it computed as many tokens as its cache holds.
    """

    def __init__(self, lanes: AnyLanes, group_depth: int) -> None:
        self._lanes = lanes
        self._group_depth = group_depth
        self._workers: dict[str, _Hinted] = {}
        self._pending: dict[str, dict[bytes, int]] = {}

    def dispatched(self, job: WaitingJob, worker_id: str) -> None:
        """Note that a job of the batch lane went to a worker: has it more of a prefix to come?

        Of several jobs at a time the last one is enough.  Not for jobs that were given back: they
        are walked apart.
        """
        hinted = self._workers.setdefault(worker_id, _Hinted())
        line = _line_of(job)
        for walk in [walk for other, walk in hinted.walks.items() if other != line]:
            self._follow(hinted, walk.job, worker_id)
        self._follow(hinted, job, worker_id)

    def computed(self, worker: Worker, tokens: int) -> None:
        """Note that a worker computed so many tokens, of prompts or of its own."""
        hinted = self._workers.get(worker.info.worker_id)
        if hinted is None:
            return
        hinted.tokens += tokens
        if hinted.tokens >= worker.capacity:
            hinted.tokens = 0
            for walk in list(hinted.walks.values()):
                self._follow(hinted, walk.job, worker.info.worker_id, is_repeat=True)

    def forget(self, worker_id: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker_id, None)
        self._pending.pop(worker_id, None)

    def take(self) -> list[Hint]:
        """Return what is new since the last time, and what is told again."""
        hints = [Hint(worker_id, refs) for worker_id, refs in self._pending.items()]
        self._pending = {}
        return hints

    def _follow(
        self, hinted: _Hinted, job: WaitingJob, worker_id: str, *, is_repeat: bool = False
    ) -> None:
        """Tell of the group behind a job, and that the one its line was in before is over."""
        line = _line_of(job)
        known = hinted.walks.pop(line, None)
        anchor, depth = self._anchor_of(job, worker_id, known.depth if known else 0)
        is_new = known is None or known.anchor != anchor
        if anchor:
            hinted.walks[line] = _Walk(job, anchor, depth)
        if known is not None and is_new:
            self._end(hinted, known, worker_id)
        if anchor and (is_new or is_repeat):
            self._tell(worker_id, anchor, self._num_waiting(job, worker_id, depth))
        if len(hinted.walks) > MAX_WALKS:
            self._end(hinted, hinted.walks.pop(next(iter(hinted.walks))), worker_id)

    def _end(self, hinted: _Hinted, walk: _Walk, worker_id: str) -> None:
        # The tenant may walk the same prefix at another priority.
        if not any(other.anchor == walk.anchor for other in hinted.walks.values()):
            self._tell(worker_id, walk.anchor, 0)

    def _anchor_of(self, job: WaitingJob, worker_id: str, guess: int) -> tuple[bytes, int]:
        """Where the prefix ends that a job shares with its worker's next one, and its depth.

        Empty if they make no group.
        """
        following = self._lanes.follower(job, worker_id)
        if following is None:
            return b"", 0
        depth = shared_depth(job.key, following[0].key, guess)
        if depth - job.hint_depth < self._group_depth:
            return b"", 0
        end = depth * ROUTING_HASH_BYTES
        return job.key[end - ROUTING_HASH_BYTES : end], depth

    def _num_waiting(self, job: WaitingJob, worker_id: str, depth: int) -> int:
        following = self._lanes.follower(job, worker_id)
        return 0 if following is None else following[1].followers(worker_id, depth)

    def _tell(self, worker_id: str, anchor: bytes, refs: int) -> None:
        self._pending.setdefault(worker_id, {})[anchor] = refs


def _line_of(job: WaitingJob) -> tuple[int, str]:
    return (job.priority, job.tenant)
