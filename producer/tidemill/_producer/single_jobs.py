"""A job that is known by its id: its output, its state, its end."""

from tidemill._jobs import Jobs
from tidemill._reads import JobStatus
from tidemill.job import Job
from tidemill.protocol.states import JobState
from tidemill.result import Result
from tidemill.stream import TokenStream
from tidemill.watch import Watches


class SingleJobs:
    """The calls of a ``Producer`` about single jobs, submitted here or elsewhere."""

    _jobs: Jobs
    _watches: Watches

    def job(self, job_id: str) -> Job:
        """Return a handle of a job submitted earlier, here or elsewhere; asks nobody."""
        return Job(job_id, _jobs=self._jobs, _watches=self._watches)

    def stream(
        self, job_id: str, *, after: str | int = 0, timeout: float | None = None
    ) -> TokenStream:
        """Iterate over a job's output, from the start or ``after`` an event id or token count."""
        return self._jobs.stream(job_id, after, timeout)

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job's whole output.

        Raises ``JobFailed`` and ``JobCancelled``, which carry the partial result, ``JobNotFound``,
        ``JobNotFinished`` after ``timeout`` seconds, or ``ProtocolError`` if what was stored cannot
        be read.
        """
        return self._jobs.result(job_id, timeout)

    def cancel(self, job_id: str) -> JobState:
        """End a job now and return its final state: another one if it had ended before.

        What it produced so far is kept.  Raises ``JobNotFound``.
        """
        return self._jobs.cancel(job_id)

    def job_status(self, job_id: str) -> JobStatus:
        """Look at a job once; raises ``JobNotFound``."""
        return self._jobs.status(job_id)
