"""Gives jobs back to the queue."""

import logging
import threading
from collections.abc import Sequence

import redis

from tidemill.protocol import calls
from tidemill.protocol.functions import Call, run_each
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

    def __init__(
        self,
        client: redis.Redis,
        keys: ShardKeys,
        worker_id: str,
        jobs: JobTable,
        alarm: Alarm,
    ) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
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

    def flush(self) -> int:
        """Give back what was collected; returns the number of jobs.

        Raises redis-py's errors. What failed is repeated next time, after the jobs that were not
        tried yet; if only some failed, the others have been given back.
        """
        with self._lock:
            batch = self._pending[:MAX_JOBS_PER_CALL]
        replies = run_each(self._client, [self._call(job) for job in batch]) if batch else []
        failed = {
            job: reply
            for job, reply in zip(batch, replies, strict=True)
            if isinstance(reply, Exception)
        }
        self._forget([job for job in batch if job not in failed])
        with self._lock:
            self._pending = self._pending[len(batch) :] + list(failed)
        for error in failed.values():
            raise error
        return len(batch)

    def _call(self, job: Job) -> Call[bool]:
        return calls.release(
            self._keys,
            job_id=job.job_id,
            fence=job.fence,
            worker_id=self._worker_id,
            queue=job.ref.queue,
        )

    def _forget(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs.discard(job)
        if jobs:
            metrics.RELEASED_JOBS.inc(len(jobs))
            _log.info("gave %d jobs back to the queue", len(jobs))
