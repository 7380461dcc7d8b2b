"""Routers that price each worker with its queue and its cache."""

from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.baselines.backend import Backend
from tidemill_scheduler.simulation.baselines.router import Router

#: While every worker has so many steps' worth of prefill ahead, jobs wait in the router.
_QUEUE_THRESHOLD = 4.0


class DynamoStyle(Router):
    """Least KV cost, behind a first-come queue in the router.

    After the KV router of NVIDIA Dynamo (lib/kv-router and its docs): cost = max(active prefill
    tokens + prompt - overlap, 0) in blocks + blocks in decode, temperature 0.  A job waits in the
    router while all workers have four steps' worth of prefill tokens ahead.
    """

    def route(self, job: WaitingJob) -> Backend | None:
        """Return the cheapest worker, None while all are busy."""
        backends = [b for b in self.backends.values() if self._is_open(b)]
        return min(backends, key=lambda b: self.price(job, b), default=None)

    def price(self, job: WaitingJob, backend: Backend) -> float:
        """Return what the job costs on a worker, in tokens."""
        block = ROUTING_STRIDE * backend.info.block_size
        overlap = backend.cached_depth(job.kv_key) * block
        return max(backend.prefill_tokens + job.cost - overlap, 0) + backend.decode_tokens

    def _is_open(self, backend: Backend) -> bool:
        limit = _QUEUE_THRESHOLD * backend.info.max_num_batched_tokens
        return backend.prefill_tokens <= limit


class LmetricStyle(DynamoStyle):
    """Least product of new prefill tokens and batch size (LMetric, arXiv 2603.15202).

    It has no weights to tune; the queue in front of it is the one of ``DynamoStyle``.
    """

    def price(self, job: WaitingJob, backend: Backend) -> float:
        """Return what the job costs on a worker, in tokens times requests."""
        new_tokens = backend.prefill_tokens + self.uncached(job, backend)
        return float(new_tokens) * (backend.num_requests + 1)
