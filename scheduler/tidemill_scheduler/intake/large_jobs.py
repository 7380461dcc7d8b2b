"""Jobs whose prompts are larger than the whole KV pool of some worker."""

from collections.abc import Collection
from itertools import islice

from tidemill_scheduler.fleet.workers import Worker, reluctance
from tidemill_scheduler.intake.jobs import WaitingJob

#: So many jobs that no worker can hold are passed over to find one that some worker can.
_MAX_PASSED = 1000


class LargeJobs:
    """Those of one model, in the order they were found.

    The worker that is to take the next one gets nothing else until it has the room.
    """

    def __init__(self) -> None:
        # Job id -> the job and when it was found, in seconds.
        self._jobs: dict[str, tuple[WaitingJob, float]] = {}
        self._capacity = 0
        self._capacity_since = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def add(self, job: WaitingJob, now: float) -> None:
        """Let a job wait here."""
        self._jobs[job.job_id] = (job, now)

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        del self._jobs[job.job_id]

    def admit(
        self, workers: Collection[Worker], fresh_since: float
    ) -> tuple[Worker | None, WaitingJob | None]:
        """Return the worker that the next job is for, and the job if it goes there now."""
        job = self._next_for(workers)
        if job is None:
            return None, None
        able = (worker for worker in workers if worker.can_hold(job))
        worker = min(able, key=lambda w: reluctance(w, job, fresh_since))
        if not worker.fits(job, job.cost):
            return worker, None
        self.remove(job)
        return worker, job

    def find_hopeless(
        self, workers: Collection[Worker], now: float, patience: float, limit: int
    ) -> list[WaitingJob]:
        """Return up to ``limit`` jobs that none of the workers could hold for so many seconds."""
        capacity = max((worker.capacity for worker in workers), default=0)
        if capacity != self._capacity:
            self._capacity, self._capacity_since = capacity, now
        if not workers or self._capacity_since + patience > now:
            return []
        found = (
            job
            for job, since in islice(self._jobs.values(), _MAX_PASSED)
            if since + patience <= now and not any(worker.can_hold(job) for worker in workers)
        )
        return list(islice(found, limit))

    def _next_for(self, workers: Collection[Worker]) -> WaitingJob | None:
        jobs = (job for job, _ in islice(self._jobs.values(), _MAX_PASSED))
        return next((j for j in jobs if any(w.can_hold(j) for w in workers)), None)
