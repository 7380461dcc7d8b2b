"""What jobs that are under way were charged to their tenants, until their true cost is known."""

from dataclasses import dataclass

from tidemill.protocol.messages import FinishedSequence
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.policy.output_lengths import OutputLengths


@dataclass(frozen=True, slots=True)
class Correction:
    """The tenant of a job owes so many tokens more, or less, than it was charged."""

    job: WaitingJob
    tokens: float


class Accounts:
    """Charges a job at its dispatch for what is expected of it, and corrects that at its end."""

    def __init__(self, output_weight: int) -> None:
        self._output_weight = output_weight
        self._lengths = OutputLengths()
        # Worker id -> job id -> the job and what it was charged.
        self._running: dict[str, dict[str, tuple[WaitingJob, float]]] = {}

    def price(self, job: WaitingJob, uncached: int) -> float:
        """Return what a job is expected to cost, in prompt tokens."""
        return uncached + self._output_weight * self._lengths.expected(job)

    def charged(self, worker_id: str, job: WaitingJob, tokens: float) -> None:
        """Note what a job was charged when it went to a worker."""
        self._running.setdefault(worker_id, {})[job.job_id] = (job, tokens)

    def finished(self, worker_id: str, sequence: FinishedSequence) -> Correction | None:
        """Return what is to be corrected now that a job has ended, None if it is not known."""
        entry = self._running.get(worker_id, {}).pop(sequence.job_id, None)
        if entry is None:
            return None
        job, charged = entry
        self._lengths.observe(job.tenant, sequence.output_tokens)
        computed = max(0, job.cost - sequence.cached_tokens)
        return Correction(job, computed + self._output_weight * sequence.output_tokens - charged)

    def returned(self, worker_id: str, job_id: str) -> Correction | None:
        """Return what is to be given back for a job that was not sent after all."""
        entry = self._running.get(worker_id, {}).pop(job_id, None)
        return None if entry is None else Correction(entry[0], -entry[1])

    def idle(self, worker_id: str) -> list[Correction]:
        """Note that a worker has no jobs; returns those it did not tell of, at what was charged."""
        jobs = self._running.pop(worker_id, {})
        return [Correction(job, 0.0) for job, _ in jobs.values()]
