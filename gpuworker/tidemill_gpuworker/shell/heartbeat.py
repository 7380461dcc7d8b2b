"""Keeps this worker's registration and the leases of its jobs alive."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import redis

from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.service.runtime import crash_point
from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbox import MAX_JOBS_PER_CALL
from tidemill_gpuworker.shell.registration import Registration
from tidemill_gpuworker.shell.work_clock import WorkClock

_log = logging.getLogger(__name__)

#: Exit status of a worker that hung: start it again.
HUNG_STATUS = 70


class Heartbeat:
    """Beats from a thread of its own, but only while the threads of ``clocks`` get on.

    A hung worker must lose its leases, so that another one takes its jobs over; a slow step, or any
    other piece of work, up to ``max_step_seconds``, must not. Once the leases are gone nothing is
    left to hope for: ``give_up`` ends the process on the spot with ``HUNG_STATUS``, because a
    thread that hangs cannot be stopped in any other way, and whoever supervises the worker starts a
    new one.
    """

    def __init__(
        self,
        client: redis.Redis,
        registration: Registration,
        jobs: JobTable,
        clocks: Sequence[WorkClock],
        *,
        max_step_seconds: float,
        on_lost: Callable[[Job], None],
        give_up: Callable[[int], object] = os._exit,
    ) -> None:
        self._client = client
        self._registration = registration
        self._jobs = jobs
        self._clocks = clocks
        self._max_step_seconds = max_step_seconds
        self._on_lost = on_lost
        self._give_up = give_up
        self._num_skipped = 0

    @property
    def hangs(self) -> bool:
        """Whether a thread has been at one piece of work for longer than a step may take."""
        return self._age > self._max_step_seconds

    @property
    def _age(self) -> float:
        return max(clock.age for clock in self._clocks)

    def beat(self) -> bool:
        """Renew everything; returns False, having done nothing, while the worker hangs."""
        if (age := self._age) > self._max_step_seconds:
            self._skip(age)
            return False
        self._num_skipped = 0
        if not self._renew():
            _log.warning("the broker has forgotten this worker, registering again")
            self._registration.register()
        return True

    def _skip(self, age: float) -> None:
        metrics.SKIPPED_BEATS.inc()
        _log.error("no heartbeat: one step, or one prompt, has taken %.0f s so far", age)
        leases_end = self._max_step_seconds + self._registration.lease_ms / 1000
        # A process that was paused finds its work old at the first look; it may yet end.
        if age > leases_end and self._num_skipped:
            _log.error("this worker hangs and its leases are over: it ends itself")
            self._give_up(HUNG_STATUS)
        self._num_skipped += 1

    def _renew(self) -> bool:
        try:
            # Every batch is sent, whatever the first one says.
            registered = {self._beat(batch) for batch in _batches(self._jobs.all())}
            return registered == {True}
        except redis.ResponseError as error:
            # An empty server has taken the place of ours.
            if "function not found" in str(error).lower():
                return False
            raise

    def _beat(self, batch: Sequence[Job]) -> bool:
        registration = self._registration
        call = calls.beat(
            registration.keys,
            worker_id=registration.info.worker_id,
            model=registration.card.name,
            tokenizer_digest=registration.card.tokenizer_digest,
            lease_ms=registration.lease_ms,
            jobs=[(job.job_id, job.fence) for job in batch],
        )
        crash_point("worker.before_beat")
        beat = run(self._client, call)
        crash_point("worker.after_beat")
        lost = set(beat.lost)
        for job in batch:
            if job.job_id in lost:
                self._on_lost(job)
        return beat.registered


def _batches(jobs: Iterable[Job]) -> Iterable[list[Job]]:
    # The first batch goes out even if it is empty: it renews the registration.
    remaining = iter(jobs)
    yield list(islice(remaining, MAX_JOBS_PER_CALL))
    while batch := list(islice(remaining, MAX_JOBS_PER_CALL)):
        yield batch
