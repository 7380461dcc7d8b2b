"""First come, first served: what other queues do, there to be compared with."""

from collections import Counter
from collections.abc import Callable

from sortedcontainers import SortedDict

from tidemill_scheduler.intake.jobs import WaitingJob, entry_number
from tidemill_scheduler.policy.ageing import NUM_CLASSES

_Place = tuple[bool, int, tuple[int, int], str]


class FifoLanes:
    """Has the face of ``Lanes`` and orders by integer priority and arrival alone."""

    def __init__(self) -> None:
        self._jobs: SortedDict[_Place, WaitingJob] = SortedDict()
        self._tenants = [Counter[str]() for _ in range(NUM_CLASSES)]
        self.tokens = [0] * NUM_CLASSES

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def has_urgent(self) -> bool:
        """Whether some jobs may use credit that others may not: here all are alike."""
        return False

    @property
    def work(self) -> tuple[float, float, float]:
        """Prompt tokens that wait in each class."""
        return (float(self.tokens[0]), float(self.tokens[1]), float(self.tokens[2]))

    def num_tenants(self, rank: int) -> int:
        """Return how many tenants have jobs in a class."""
        return len(self._tenants[rank])

    def num_jobs(self, rank: int) -> int:
        """Return how many jobs wait in a class."""
        return self._tenants[rank].total()

    def add(self, job: WaitingJob, now: float) -> None:
        """Let a job wait; it is no particular worker's."""
        self._jobs[_place_of(job)] = job
        self._tenants[job.priority_class][job.tenant] += 1
        self.tokens[job.priority_class] += job.cost

    def remove(self, job: WaitingJob) -> None:
        """Take a job out; raises ``KeyError``."""
        del self._jobs[_place_of(job)]
        tenants = self._tenants[job.priority_class]
        tenants[job.tenant] -= 1
        if not tenants[job.tenant]:
            del tenants[job.tenant]
        self.tokens[job.priority_class] -= job.cost

    def take(self, job: WaitingJob, worker_id: str, tokens: float, now: float) -> bool:
        """Take a job out for a worker; returns that nobody is charged."""
        self.remove(job)
        return False

    def adjust(self, job: WaitingJob, tokens: float) -> None:
        """Nobody has an account here."""

    def next_for(
        self, worker_id: str, now: float, yields: Callable[[str], bool] | None
    ) -> WaitingJob | None:
        """Return the job that came first."""
        return self._jobs.peekitem(0)[1] if self._jobs else None

    def urgent_for(self, worker_id: str, now: float) -> None:
        """Nobody goes before those who came first."""

    def is_bound(self, job: WaitingJob) -> bool:
        """Whether a job's worker is settled: whoever asks first gets it."""
        return True

    def walks(self, worker_id: str) -> None:
        """Nobody has a part of the order to itself."""

    def follower(self, job: WaitingJob, worker_id: str) -> None:
        """Nobody knows who comes next on a worker."""

    def refresh(self, worker_id: str) -> None:
        """Nothing here depends on a worker."""

    def release(self, worker_id: str, now: float) -> None:
        """Nothing here is any worker's."""


def _place_of(job: WaitingJob) -> _Place:
    return (job.attempts == 0, job.priority, entry_number(job.entry_id), job.job_id)
