"""Keeps jobs that may be killing their workers away from jobs that would die with them."""

from collections.abc import Iterable, Mapping

from tidemill.protocol.calls import MAX_CRASHES
from tidemill_scheduler.fleet.workers import Worker, reluctance
from tidemill_scheduler.intake.jobs import WaitingJob

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

    def __len__(self) -> int:
        return len(self._suspects)

    def admit(
        self, workers: Mapping[str, Worker], fresh_since: float
    ) -> tuple[str | None, WaitingJob | None]:
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
        job = next(iter(self._suspects.values()))
        if self._ward is None or not workers[self._ward].can_hold(job):
            self._ward = _best_ward(job, workers.values(), fresh_since)
        if not workers[self._ward].is_settled:
            return self._ward, None
        self._trial = job.job_id
        self.remove(job)
        return self._ward, job


def _best_ward(job: WaitingJob, workers: Iterable[Worker], fresh_since: float) -> str:
    best = min(workers, key=lambda w: (not w.can_hold(job), *reluctance(w, job, fresh_since)))
    return best.info.worker_id
