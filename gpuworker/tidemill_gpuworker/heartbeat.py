"""Keeps this worker's registration and the leases of its jobs alive."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import redis

from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.service.runtime import crash_point
from tidemill_gpuworker import metrics
from tidemill_gpuworker.jobs import Job, JobTable
from tidemill_gpuworker.outbox import MAX_JOBS_PER_CALL
from tidemill_gpuworker.registration import Registration

_log = logging.getLogger(__name__)

#: Exit status of a worker whose engine hung: start it again.
HUNG_STATUS = 70


class StepClock:
    """How long the present engine step has been running; no age between steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._started_at = self._clock()

    def stop(self) -> float:
        """The step has ended; returns its duration in seconds."""
        duration = self.age
        self._started_at = None
        return duration

    @property
    def age(self) -> float:
        """Seconds since the present step began, 0 without one."""
        started_at = self._started_at
        return 0.0 if started_at is None else self._clock() - started_at


class Heartbeat:
    """Beats from a thread of its own, but only while the engine moves.

    A hung engine must lose its leases, so that another worker takes its jobs over; a slow step,
    up to ``max_step_seconds``, must not. Once the leases are gone nothing is left to hope for:
    ``give_up`` ends the process on the spot with ``HUNG_STATUS``, because a thread that hangs
    cannot be stopped in any other way, and whoever supervises the worker starts a new one.
    """

    def __init__(
        self,
        client: redis.Redis,
        registration: Registration,
        jobs: JobTable,
        step_clock: StepClock,
        *,
        max_step_seconds: float,
        on_lost: Callable[[Job], None],
        give_up: Callable[[int], object] = os._exit,
    ) -> None:
        self._client = client
        self._registration = registration
        self._jobs = jobs
        self._step_clock = step_clock
        self._max_step_seconds = max_step_seconds
        self._on_lost = on_lost
        self._give_up = give_up
        self._num_skipped = 0

    @property
    def engine_hangs(self) -> bool:
        """Whether the present step takes longer than a step may."""
        return self._step_clock.age > self._max_step_seconds

    def beat(self) -> bool:
        """Renew everything; returns False, having done nothing, while the engine hangs."""
        if self.engine_hangs:
            self._skip(self._step_clock.age)
            return False
        self._num_skipped = 0
        if not self._renew():
            _log.warning("the broker has forgotten this worker, registering again")
            self._registration.register()
        return True

    def _skip(self, step_age: float) -> None:
        metrics.SKIPPED_BEATS.inc()
        _log.error("no heartbeat: a step has been running for %.0f s", step_age)
        leases_end = self._max_step_seconds + self._registration.lease_ms / 1000
        # A process that was paused finds its step old at the first look; it may yet end.
        if step_age > leases_end and self._num_skipped:
            _log.error("the engine hangs, its leases are over: this worker ends itself")
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
