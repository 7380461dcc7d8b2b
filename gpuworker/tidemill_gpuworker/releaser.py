"""Gives jobs back to the queue."""

import logging
import threading

import redis

from tidemill.protocol import calls
from tidemill.protocol.functions import run_many
from tidemill.protocol.keys import ShardKeys
from tidemill_gpuworker import metrics
from tidemill_gpuworker.alarm import Alarm
from tidemill_gpuworker.jobs import Job, JobTable
from tidemill_gpuworker.outbox import MAX_JOBS_PER_CALL

_log = logging.getLogger(__name__)


class Releaser:
    """Collects jobs that this worker will not finish; ``flush`` hands them to the scheduler.

    A released job keeps its token log, so the next worker goes on where this one stopped.
    """

    def __init__(self, client: redis.Redis, keys: ShardKeys, jobs: JobTable, alarm: Alarm) -> None:
        self._client = client
        self._keys = keys
        self._jobs = jobs
        self._alarm = alarm
        self._lock = threading.Lock()
        self._pending: list[Job] = []

    @property
    def has_work(self) -> bool:
        """Whether a job still has to be given back."""
        return bool(self._pending)

    def release(self, job: Job) -> None:
        """Have ``job`` given back by the next ``flush``."""
        with self._lock:
            self._pending.append(job)
        self._alarm.ring()

    def flush(self) -> None:
        """Give back what was collected; raises redis-py's errors, and then repeats it next time."""
        with self._lock:
            batch = self._pending[:MAX_JOBS_PER_CALL]
        if not batch:
            return
        run_many(
            self._client,
            [
                calls.release(self._keys, job_id=job.job_id, fence=job.fence, queue=job.queue)
                for job in batch
            ],
        )
        for job in batch:
            self._jobs.discard(job)
        metrics.RELEASED_JOBS.inc(len(batch))
        _log.info("gave %d jobs back to the queue", len(batch))
        with self._lock:
            del self._pending[: len(batch)]
