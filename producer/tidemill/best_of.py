"""A handle of the candidates that answer one prompt, for the synchronous client."""

from dataclasses import dataclass

from tidemill._best_of import Clock, Rating, best_of, results_of
from tidemill.job import Job
from tidemill.protocol.errors import JobCancelled, JobError, JobFailed
from tidemill.protocol.states import JobState
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class BestOf:
    """The jobs of one prompt that ``Producer.submit_best_of`` has queued."""

    jobs: tuple[Job, ...]

    def results(self, timeout: float | None = None) -> list[Result]:
        """Wait for all candidates, in the order of their numbers; raises the first one's error.

        ``timeout`` bounds the whole wait, in seconds; see ``Producer.result``.
        """
        return results_of(self._outcomes(timeout))

    def best(self, key: Rating, timeout: float | None = None) -> Result:
        """Wait for all candidates and return the one for which ``key(result)`` is highest.

        Failed and cancelled candidates do not take part; if nothing is left the first one's error
        is raised.
        """
        return best_of(self._outcomes(timeout), key)

    def cancel(self) -> list[JobState]:
        """End all candidates now; see ``Producer.cancel``."""
        return [job.cancel() for job in self.jobs]

    def _outcomes(self, timeout: float | None) -> list[Result | JobError]:
        clock = Clock(timeout)
        return [_outcome(job, clock.left) for job in self.jobs]


def _outcome(job: Job, timeout: float | None) -> Result | JobError:
    try:
        return job.result(timeout)
    except (JobFailed, JobCancelled) as error:
        return error
