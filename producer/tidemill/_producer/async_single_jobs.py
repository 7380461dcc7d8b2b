"""The asynchronous twin of ``tidemill._producer.single_jobs``."""

from tidemill._async_jobs import AsyncJobs
from tidemill._reads import JobStatus
from tidemill.async_job import AsyncJob
from tidemill.async_stream import AsyncTokenStream
from tidemill.async_watch import AsyncWatches
from tidemill.protocol.states import JobState
from tidemill.result import Result


class AsyncSingleJobs:
    """The calls of an ``AsyncProducer`` about single jobs; see ``SingleJobs``."""

    _jobs: AsyncJobs
    _watches: AsyncWatches

    def job(self, job_id: str) -> AsyncJob:
        """Return a handle of a job submitted earlier, here or elsewhere; asks nobody."""
        return AsyncJob(job_id, _jobs=self._jobs, _watches=self._watches)

    def stream(
        self, job_id: str, *, after: str | int = 0, timeout: float | None = None
    ) -> AsyncTokenStream:
        """Iterate over a job's output, from the start or ``after`` an event id or token count."""
        return self._jobs.stream(job_id, after, timeout)

    async def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job's whole output.

        Raises ``JobFailed`` and ``JobCancelled``, which carry the partial result, ``JobNotFound``,
        ``JobNotFinished`` after ``timeout`` seconds, or ``ProtocolError`` if what was stored cannot
        be read.
        """
        return await self._jobs.result(job_id, timeout)

    async def cancel(self, job_id: str) -> JobState:
        """End a job now and return its final state: another one if it had ended before.

        What it produced so far is kept.  Raises ``JobNotFound``.
        """
        return await self._jobs.cancel(job_id)

    async def job_status(self, job_id: str) -> JobStatus:
        """Look at a job once; raises ``JobNotFound``."""
        return await self._jobs.status(job_id)
