"""Keeps jobs that may be killing their workers away from jobs that would die with them."""

from collections.abc import Mapping

from tidemill.protocol.calls import MAX_CRASHES
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.workers import Worker

#: A job that ended this many workers without producing a token is dead after one more.
SUSPECT_CRASHES = MAX_CRASHES - 1


class Quarantine:
    """Tries the suspects of one model one at a time on one worker, its *ward*.

    While there are suspects the ward gets nothing else.  Jobs that already produce tokens may stay
    there: a crash does not count against them.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, WaitingJob] = {}
        self._ward: str | None = None
        self._trial: str | None = None

    def add(self, job: WaitingJob) -> None:
        """Let a suspect wait for its trial."""
        self._suspects[job.job_id] = job

    def remove(self, job: WaitingJob) -> None:
        """Take a suspect out; raises ``KeyError``."""
        del self._suspects[job.job_id]

    def admit(self, workers: Mapping[str, Worker]) -> tuple[str | None, WaitingJob | None]:
        """Return the ward, if one is needed, and the suspect whose trial there begins now."""
        if self._ward not in workers:
            self._ward = self._trial = None
        if self._trial is not None and workers[self._ward or ""].is_settled:
            self._trial = None
        if self._trial is not None:
            return self._ward, None
        if not self._suspects or not workers:
            self._ward = None
            return None, None
        if self._ward is None:
            self._ward = min(workers, key=lambda worker_id: workers[worker_id].num_seqs)
        if not workers[self._ward].is_settled:
            return self._ward, None
        self._trial, job = next(iter(self._suspects.items()))
        del self._suspects[self._trial]
        return self._ward, job
