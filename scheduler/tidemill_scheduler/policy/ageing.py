"""Who has waited too long behind jobs of higher classes: pure, the clock is the caller's."""

from collections import deque
from collections.abc import Mapping

from tidemill_scheduler.intake.jobs import WaitingJob

#: Classes of priority, the best first.
NUM_CLASSES = 3

DEFAULT_AGE_SECONDS = 30.0

#: Jobs of a class that are remembered, by how many jobs wait: beyond this many times as many, some
#: are looked at whenever one comes, and those that have left are forgotten.
_MOST_REMEMBERED = 1.25
_NUM_SWEPT = 4


def class_of(priority: int) -> int:
    """Return the class of a priority: 0 interactive, 1 standard, 2 batch."""
    return int(priority >= 0) + int(priority > 0)


class Ageing:
    """Remembers the waiting jobs of each class in the order they came.

    A job that has waited ``age_seconds`` counts as one of the next higher class, after twice that
    as one of the class above.  ``waiting`` are all jobs that still wait, by id, and who left is
    forgotten little by little: a waiting job costs a reference here and no more.
    """

    def __init__(self, waiting: Mapping[str, WaitingJob], age_seconds: float) -> None:
        self._waiting = waiting
        self._age_seconds = age_seconds
        self._classes = [_Line(waiting) for _ in range(NUM_CLASSES)]

    def add(self, job: WaitingJob) -> None:
        """Note that a job waits."""
        self._classes[class_of(job.priority)].add(job)

    def risen(self, priority: int, now: float) -> WaitingJob | None:
        """Return the job that waits longest of those that a job of ``priority`` must not precede.

        They are of another priority and have aged so much that they count as of its class or a
        better one.  Only the first that came of each class is looked at.
        """
        rank = class_of(priority)
        oldest = (job for line in self._classes if (job := line.first()) is not None)
        aged = (job for job in oldest if 0 < self._steps(job, now) >= class_of(job.priority) - rank)
        others = (job for job in aged if job.priority != priority)
        return min(others, key=lambda job: job.since, default=None)

    def _steps(self, job: WaitingJob, now: float) -> int:
        return int((now - job.since) / self._age_seconds)


class _Line:
    """The jobs of one class in the order they came; few of them have left.

    ```
    swept | unswept   each newcomer goes to the end of the right part; if many have left, a few
                      from its beginning go over to the left one, or are forgotten
    ```
    When the right part is empty the left one takes its place.  So nobody ever has to look at all
    of them at once.
    """

    def __init__(self, waiting: Mapping[str, WaitingJob]) -> None:
        self._waiting = waiting
        self._swept: deque[WaitingJob] = deque()
        self._unswept: deque[WaitingJob] = deque()

    def add(self, job: WaitingJob) -> None:
        """Note that a job waits."""
        self._unswept.append(job)
        if len(self._swept) + len(self._unswept) > _MOST_REMEMBERED * len(self._waiting):
            self._sweep()

    def first(self) -> WaitingJob | None:
        """Return the job that came first of those that wait."""
        for jobs in (self._swept, self._unswept):
            while jobs:
                if self._waiting.get(jobs[0].job_id) is jobs[0]:
                    return jobs[0]
                jobs.popleft()
        return None

    def _sweep(self) -> None:
        for _ in range(_NUM_SWEPT):
            first = self._unswept.popleft()
            if self._waiting.get(first.job_id) is first:
                self._swept.append(first)
            if not self._unswept:
                self._swept, self._unswept = self._unswept, self._swept
                break
