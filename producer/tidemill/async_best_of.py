"""The asynchronous twin of ``tidemill.best_of``."""

from dataclasses import dataclass

from tidemill._best_of import Clock, Rating, best_of, results_of
from tidemill.async_job import AsyncJob
from tidemill.protocol.errors import JobCancelled, JobError, JobFailed
from tidemill.protocol.states import JobState
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class AsyncBestOf:
    """The jobs of one prompt that ``AsyncProducer.submit_best_of`` has queued."""

    jobs: tuple[AsyncJob, ...]

    async def results(self, timeout: float | None = None) -> list[Result]:
        """Wait for all candidates, in the order of their numbers; raises the first one's error.

        ``timeout`` bounds the whole wait, in seconds; see ``AsyncProducer.result``.
        """
        return results_of(await self._outcomes(timeout))

    async def best(self, key: Rating, timeout: float | None = None) -> Result:
        """Wait for all candidates and return the one for which ``key(result)`` is highest.

        Failed and cancelled candidates do not take part; if nothing is left the first one's error
        is raised.
        """
        return best_of(await self._outcomes(timeout), key)

    async def cancel(self) -> list[JobState]:
        """End all candidates now; see ``AsyncProducer.cancel``."""
        return [await job.cancel() for job in self.jobs]

    async def _outcomes(self, timeout: float | None) -> list[Result | JobError]:
        clock = Clock(timeout)
        return [await _outcome(job, clock.left) for job in self.jobs]


async def _outcome(job: AsyncJob, timeout: float | None) -> Result | JobError:
    try:
        return await job.result(timeout)
    except (JobFailed, JobCancelled) as error:
        return error
