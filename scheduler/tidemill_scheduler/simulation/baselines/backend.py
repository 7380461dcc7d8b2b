"""One worker as a router sees it."""

from collections import deque

from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.routing_hashes import depth_within


class Backend:
    """A worker, the jobs that were routed to it and not sent, and those that it runs.

    A real router would hand the jobs over; here they wait in front of the worker's credit, in the
    order in which the worker itself would take them.
    """

    def __init__(self, info: WorkerInfo, now: float) -> None:
        self.info = info
        self.worker = Worker(info, now)
        self.queue: deque[WaitingJob] = deque()
        #: Jobs sent and not known to have ended, with the prompt tokens they were to compute.
        self.running: dict[str, tuple[WaitingJob, int]] = {}
        #: Uncached prompt tokens of the jobs in ``queue``, as far as they were known when routed.
        self.queued_tokens = 0
        #: Routing hashes in its cache, as its KV events tell.
        self.cached: set[bytes] = set()

    @property
    def num_requests(self) -> int:
        """Requests queued and running."""
        return len(self.queue) + len(self.running)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were routed to it and not computed."""
        return self.queued_tokens + self.worker.outstanding_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens whose KV entries running requests hold."""
        return sum(job.cost for job, _ in self.running.values())

    def update(self, status: WorkerStatus, now: float) -> None:
        """Take in a status."""
        self.worker.update(status, now)
        for sequence in status.finished:
            self.running.pop(sequence.job_id, None)

    def cached_depth(self, key: bytes) -> int:
        """Return how many leading hashes of a key are cached."""
        return depth_within(key, self.cached)
