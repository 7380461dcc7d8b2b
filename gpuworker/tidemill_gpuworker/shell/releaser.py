"""Gives jobs back to the queue."""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis

from tidemill.protocol import calls
from tidemill.protocol.calls import NackOutcome, RetryPause
from tidemill.protocol.functions import Call, run_each
from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import crash_point
from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbox import MAX_JOBS_PER_CALL

_log = logging.getLogger(__name__)

#: Shares of the full pause; they spread the retries of jobs that failed together.
_MIN_JITTER, _MAX_JITTER = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class _Return:
    """A job on its way back; with ``error`` it waits before it is tried again."""

    job: Job
    error: str | None = None
    jitter: float = 1.0


def _jitter() -> float:
    return random.uniform(_MIN_JITTER, _MAX_JITTER)


class Releaser:
    """Collects jobs that this worker will not finish; ``flush`` hands them to the scheduler.

    A job given back keeps its token log, so the next worker goes on where this one stopped.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: ShardKeys,
        worker_id: str,
        jobs: JobTable,
        alarm: Alarm,
        *,
        pause: RetryPause | None = None,
        jitter: Callable[[], float] = _jitter,
    ) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._jobs = jobs
        self._alarm = alarm
        self._pause = pause or RetryPause()
        self._jitter = jitter
        self._lock = threading.Lock()
        self._pending: list[_Return] = []

    @property
    def has_work(self) -> bool:
        """Whether a job still has to be given back."""
        return bool(self._pending)

    def has(self, job: Job) -> bool:
        """Whether this attempt is on its way back."""
        with self._lock:
            return any(item.job == job for item in self._pending)

    def release(self, job: Job) -> None:
        """Have ``job`` given back by the next ``flush``, to run again as soon as it can."""
        self._add(_Return(job))

    def nack(self, job: Job, error: str) -> None:
        """Have ``job`` given back after an error that may pass: that uses up one of its retries."""
        self._add(_Return(job, error, self._jitter()))

    def flush(self) -> int:
        """Give back what was collected; returns the number of jobs.

        Raises redis-py's errors. What failed is repeated next time, after the jobs that were not
        tried yet; if only some failed, the others have been given back.
        """
        with self._lock:
            batch = self._pending[:MAX_JOBS_PER_CALL]
        _pass_crash_point("before", batch)
        replies = run_each(self._client, [self._call(item) for item in batch]) if batch else []
        _pass_crash_point("after", batch)
        failed = [
            (item, reply)
            for item, reply in zip(batch, replies, strict=True)
            if isinstance(reply, Exception)
        ]
        self._settle(batch, replies)
        with self._lock:
            self._pending = self._pending[len(batch) :] + [item for item, _ in failed]
        for _, error in failed:
            raise error
        return len(batch)

    def _add(self, item: _Return) -> None:
        with self._lock:
            self._pending.append(item)
        self._alarm.ring()

    def _call(self, item: _Return) -> Call[Any]:
        job = item.job
        if item.error is not None:
            return calls.nack(
                self._keys,
                job.ref,
                fence=job.fence,
                worker_id=self._worker_id,
                error=item.error,
                pause=replace(self._pause, jitter=item.jitter),
            )
        return calls.release(
            self._keys,
            job_id=job.job_id,
            fence=job.fence,
            worker_id=self._worker_id,
            queue=job.ref.queue,
        )

    def _settle(self, batch: Sequence[_Return], replies: Sequence[Any]) -> None:
        num_released = 0
        for item, reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                continue
            self._jobs.discard(item.job)
            if isinstance(reply, NackOutcome):
                _told(item, reply)
            else:
                num_released += 1
        if num_released:
            metrics.RELEASED_JOBS.inc(num_released)
            _log.info("gave %d jobs back to the queue", num_released)


def _told(item: _Return, outcome: NackOutcome) -> None:
    # Not ours: it has ended meanwhile, or the reply to the same nack was lost.
    _log.info("%s: %s after an error", item.job.job_id, outcome.name.lower())
    metrics.RETRIED_JOBS.labels(outcome.name.lower()).inc()


def _pass_crash_point(moment: str, batch: Sequence[_Return]) -> None:
    if any(item.error is not None for item in batch):
        crash_point(f"worker.{moment}_nack")
    if any(item.error is None for item in batch):
        crash_point(f"worker.{moment}_release")
