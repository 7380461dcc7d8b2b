"""The jobs a worker holds leases of."""

import threading
from dataclasses import dataclass

from tidemill.protocol.calls import JobRef


@dataclass(frozen=True, slots=True)
class Job:
    """One claimed attempt of a job: what every write about it needs.

    ``fence`` is the number of the attempt; the server refuses writes that carry an older one.
    """

    ref: JobRef
    fence: int
    stream: bool = True

    @property
    def job_id(self) -> str:
        """The job that is attempted."""
        return self.ref.job_id


class JobTable:
    """Which attempts are ours, shared by all threads of a worker.

    A job stays in here from the moment its command was read until its end is written or it is
    lost, because its lease must be renewed all that time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        """Take up an attempt; it replaces an older attempt of the same job."""
        with self._lock:
            self._jobs[job.job_id] = job

    def discard(self, job: Job) -> None:
        """Drop an attempt, unless a newer one has replaced it."""
        with self._lock:
            if self._jobs.get(job.job_id) == job:
                del self._jobs[job.job_id]

    def get(self, job_id: str) -> Job | None:
        """The attempt we hold of this job."""
        return self._jobs.get(job_id)

    def holds(self, job: Job) -> bool:
        """Whether exactly this attempt is still ours."""
        return self._jobs.get(job.job_id) == job

    def all(self) -> list[Job]:
        """Every attempt we hold, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
