"""What jobs that are under way were charged to their tenants, until their true cost is known."""

from typing import NamedTuple

from tidemill.protocol.messages import FinishedSequence
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.output_lengths import OutputLengths


class Running(NamedTuple):
    """A job that went to a worker, and what its tenant was charged; None if it was not."""

    job: WaitingJob
    charged: float | None


class Accounts:
    """Charges a job at its dispatch for what is expected of it, and corrects that at its end."""

    def __init__(self, output_weight: int) -> None:
        self._output_weight = output_weight
        self._lengths = OutputLengths()
        # Worker id -> job id -> the job.
        self._running: dict[str, dict[str, Running]] = {}

    def price(self, job: WaitingJob, uncached: int) -> float:
        """Return what a job is expected to cost, in prompt tokens."""
        return uncached + self._output_weight * self._lengths.expected(job)

    def cost(self, job: WaitingJob, sequence: FinishedSequence) -> float:
        """Return what a job has cost, in prompt tokens."""
        # What a pointer claims is good for an estimate; the worker has counted.
        length = sequence.prompt_tokens or job.cost
        computed = max(0, length - sequence.cached_tokens)
        return computed + self._output_weight * sequence.output_tokens

    def charged(self, worker_id: str, running: Running) -> None:
        """Note what a job was charged when it went to a worker."""
        self._running.setdefault(worker_id, {})[running.job.job_id] = running

    def finished(self, worker_id: str, sequence: FinishedSequence) -> Running | None:
        """Learn from the end of a job; returns it, None if it is not known."""
        running = self.returned(worker_id, sequence.job_id)
        if running is not None:
            self._lengths.observe(running.job.tenant, sequence.output_tokens)
        return running

    def returned(self, worker_id: str, job_id: str) -> Running | None:
        """Forget a job that was not sent after all; returns it, None if it is not known."""
        return self._running.get(worker_id, {}).pop(job_id, None)

    def idle(self, worker_id: str) -> list[Running]:
        """Note that a worker has no jobs; returns those of whose ends it did not tell."""
        return list(self._running.pop(worker_id, {}).values())
