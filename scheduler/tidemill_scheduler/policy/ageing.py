"""Who has waited too long behind jobs of higher classes: pure, the clock is the caller's."""

from collections import deque
from collections.abc import Mapping

from tidemill_scheduler.jobs import WaitingJob

#: Classes of priority, the best first.
NUM_CLASSES = 3

DEFAULT_AGE_SECONDS = 30.0

#: Jobs that have left and are still remembered, beside as many as wait.
_SLACK = 1024


def class_of(priority: int) -> int:
    """Return the class of a priority: 0 interactive, 1 standard, 2 batch."""
    return int(priority >= 0) + int(priority > 0)


class Ageing:
    """Remembers the waiting jobs of each class in the order they came.

    A job that has waited ``age_seconds`` counts as one of the next higher class, after twice that
    as one of the class above.  ``waiting`` are all jobs that still wait, by id: who left is
    forgotten when its turn comes, so that a waiting job costs a reference here and no more.
    """

    def __init__(self, waiting: Mapping[str, WaitingJob], age_seconds: float) -> None:
        self._waiting = waiting
        self._age_seconds = age_seconds
        self._classes = [deque[WaitingJob]() for _ in range(NUM_CLASSES)]

    def add(self, job: WaitingJob) -> None:
        """Note that a job waits."""
        jobs = self._classes[class_of(job.priority)]
        self._first(jobs)
        if len(jobs) > 2 * len(self._waiting) + _SLACK:
            kept = [known for known in jobs if self._waiting.get(known.job_id) is known]
            jobs.clear()
            jobs.extend(kept)
        jobs.append(job)

    def risen(self, priority: int, now: float) -> WaitingJob | None:
        """Return the job that waits longest of those that a job of ``priority`` must not precede.

        They are of another priority and have aged so much that they count as of its class or a
        better one.  Only the first that came of each class is looked at.
        """
        rank = class_of(priority)
        oldest = (job for jobs in self._classes if (job := self._first(jobs)) is not None)
        aged = (job for job in oldest if 0 < self._steps(job, now) >= class_of(job.priority) - rank)
        others = (job for job in aged if job.priority != priority)
        return min(others, key=lambda job: job.since, default=None)

    def _first(self, jobs: deque[WaitingJob]) -> WaitingJob | None:
        while jobs and self._waiting.get(jobs[0].job_id) is not jobs[0]:
            jobs.popleft()
        return jobs[0] if jobs else None

    def _steps(self, job: WaitingJob, now: float) -> int:
        return int((now - job.since) / self._age_seconds)
