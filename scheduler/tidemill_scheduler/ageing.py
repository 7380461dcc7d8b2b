"""Who has waited too long behind jobs of higher classes: pure, the clock is the caller's."""

from collections import OrderedDict

from tidemill.protocol.calls import queue_class
from tidemill_scheduler.jobs import WaitingJob

#: Classes of priority, the best first.
NUM_CLASSES = 3

DEFAULT_AGE_SECONDS = 30.0


def class_of(priority: int) -> int:
    """Return the class of a priority: 0 interactive, 1 standard, 2 batch."""
    return int(queue_class(priority).removeprefix("p"))


class Ageing:
    """Remembers the waiting jobs of each class in the order they came; all in constant time.

    A job that has waited ``age_seconds`` counts as one of the next higher class, after twice that
    as one of the class above.
    """

    def __init__(self, age_seconds: float) -> None:
        self._age_seconds = age_seconds
        self._classes = [OrderedDict[str, WaitingJob]() for _ in range(NUM_CLASSES)]

    def add(self, job: WaitingJob) -> None:
        """Note that a job waits."""
        self._classes[class_of(job.priority)][job.job_id] = job

    def remove(self, job: WaitingJob) -> None:
        """Forget a job; raises ``KeyError``."""
        del self._classes[class_of(job.priority)][job.job_id]

    def risen(self, priority: int, now: float) -> WaitingJob | None:
        """Return the job that waits longest of those that a job of ``priority`` must not precede.

        They are of another priority and have aged so much that they count as of its class or a
        better one.  Only the first that came of each class is looked at.
        """
        rank = class_of(priority)
        oldest = (next(iter(jobs.values())) for jobs in self._classes if jobs)
        aged = (job for job in oldest if 0 < self._steps(job, now) >= class_of(job.priority) - rank)
        others = (job for job in aged if job.priority != priority)
        return min(others, key=lambda job: job.since, default=None)

    def _steps(self, job: WaitingJob, now: float) -> int:
        return int((now - job.since) / self._age_seconds)
