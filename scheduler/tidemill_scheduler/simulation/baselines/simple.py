"""Baselines that look at no cache."""

from bisect import bisect_left
from hashlib import blake2b
from itertools import islice

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.baselines.backend import Backend
from tidemill_scheduler.simulation.baselines.router import Router

#: Points that each worker has on the ring.
_RING_POINTS = 160
#: A worker with so many times the mean load is passed over.
_MAX_LOAD = 1.25
#: Tokens of the prompt that are hashed.
_PREFIX_TOKENS = 256


class PullFifo(Router):
    """Workers pull from one queue when they have room: jobs stay in it until then."""

    def route(self, job: WaitingJob) -> Backend | None:
        """Return the least loaded of those that would send the job at once."""
        open_backends = (b for b in self.backends.values() if not b.queue and b.worker.has_credit)
        fitting = (b for b in open_backends if b.worker.fits(job, self.uncached(job, b)))
        return min(fitting, key=lambda b: b.worker.load, default=None)


class RoundRobin(Router):
    """One worker after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._num_routed = 0

    def route(self, job: WaitingJob) -> Backend | None:
        """Return the worker after the last one."""
        self._num_routed += 1
        position = self._num_routed % len(self.backends)
        return next(islice(self.backends.values(), position, None))


class PrefixHashRing(Router):
    """Consistent hashing of a prompt's beginning with bounded loads.

    After the ``prefix_hash`` policy of the SGLang model gateway (lightseekorg/smg): hash the first
    256 tokens onto a ring, go on to the next worker while one has 1.25 times the mean load.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ring: list[tuple[bytes, str]] = []
        self._members: frozenset[str] = frozenset()

    def route(self, job: WaitingJob) -> Backend | None:
        """Return the first worker on the ring that is not overloaded."""
        self._refresh()
        first = next(iter(self.backends.values())).info
        num_hashes = max(1, _PREFIX_TOKENS // (4 * first.block_size))
        point = blake2b(job.kv_key[: 8 * num_hashes] or job.job_id.encode()).digest()
        start = bisect_left(self._ring, (point, ""))
        mean = sum(b.num_requests for b in self.backends.values()) / len(self.backends)
        for offset in range(len(self._ring)):
            backend = self.backends[self._ring[(start + offset) % len(self._ring)][1]]
            if backend.num_requests <= _MAX_LOAD * (mean + 1):
                return backend
        return None

    def _refresh(self) -> None:
        if self._members == self.backends.keys():
            return
        self._members = frozenset(self.backends)
        self._ring = sorted(
            (blake2b(f"{worker_id}/{n}".encode()).digest(), worker_id)
            for worker_id in self.backends
            for n in range(_RING_POINTS)
        )
