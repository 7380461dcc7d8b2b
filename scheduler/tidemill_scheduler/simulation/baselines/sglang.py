"""The router and the worker queue of SGLang, by their published rules."""

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.routing_hashes import depth_within, split_key
from tidemill_scheduler.simulation.baselines.backend import Backend
from tidemill_scheduler.simulation.baselines.router import Router

#: Above this share of the prompt a match decides.
_MATCH_SHARE = 0.5
#: The load is unbalanced from this difference and this ratio on.
_MAX_DIFFERENCE = 32
_MAX_RATIO = 1.1
#: A worker sorts no longer queue than this by longest prefix match.
_MAX_SORTED = 128


class SglangStyle(Router):
    """Cache-aware routing, and longest prefix match in the worker's queue.

    After ``cache_aware`` of the gateway (lightseekorg/smg): an approximate tree for each worker of
    what was routed there; the best match above half the prompt wins, else the smallest tree; the
    shortest queue when loads differ by more than 32 and by a tenth.  Each worker takes the longest
    match with its cache first while at most 128 requests wait (sglang, ``schedule_policy.py``).
    The trees here never evict, which flatters it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trees: dict[str, set[bytes]] = {}

    def route(self, job: WaitingJob) -> Backend | None:
        """Return the worker whose tree matches best, or one that is less loaded."""
        backends = list(self.backends.values())
        loads = [backend.num_requests for backend in backends]
        if max(loads) - min(loads) > _MAX_DIFFERENCE and max(loads) > _MAX_RATIO * min(loads):
            return min(backends, key=lambda b: b.num_requests)
        matches = [self._match(job.kv_key, backend) for backend in backends]
        best = max(matches)
        if best * ROUTING_HASH_BYTES > _MATCH_SHARE * len(job.kv_key):
            return backends[matches.index(best)]
        return min(backends, key=lambda b: len(self._tree(b)))

    def routed(self, job: WaitingJob, backend: Backend) -> None:
        """Add the job's prefixes to the worker's tree."""
        key = job.kv_key
        self._tree(backend).update(split_key(key))

    def pick(self, backend: Backend) -> WaitingJob:
        """Return the job with the longest match, the first one in a long queue."""
        if len(backend.queue) > _MAX_SORTED:
            return backend.queue[0]
        return max(backend.queue, key=lambda job: backend.cached_depth(job.kv_key))

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker with its tree."""
        self._trees.pop(worker_id, None)
        super().remove_worker(worker_id)

    def _tree(self, backend: Backend) -> set[bytes]:
        return self._trees.setdefault(backend.info.worker_id, set())

    def _match(self, key: bytes, backend: Backend) -> int:
        return depth_within(key, self._tree(backend))
