"""A handle of one job, for the asynchronous client."""

from dataclasses import dataclass, field

from tidemill._async_jobs import AsyncJobs
from tidemill._callbacks import Callbacks, OnDone, OnError, OnToken
from tidemill._reads import JobStatus
from tidemill._receipt import UNKNOWN, Receipt, estimated_wait
from tidemill.async_stream import AsyncTokenStream
from tidemill.async_watch import AsyncWatch, AsyncWatches
from tidemill.protocol.states import JobState
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class AsyncJob:
    """A name for one job of an ``AsyncProducer``; see ``Job``."""

    id: str
    is_new: bool = False
    durability: str = UNKNOWN
    _jobs: AsyncJobs = field(kw_only=True, repr=False, compare=False)
    _watches: AsyncWatches = field(kw_only=True, repr=False, compare=False)
    _receipt: Receipt | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def estimated_wait(self) -> float | None:
        """Seconds for which the job was likely to wait; see ``Job.estimated_wait``."""
        return estimated_wait(self._receipt)

    @property
    def deadline_at_risk(self) -> bool:
        """Whether the job was likely to wait beyond its deadline."""
        return self._receipt is not None and self._receipt.deadline_at_risk

    def stream(self, *, after: str | int = 0, timeout: float | None = None) -> AsyncTokenStream:
        """Iterate over the output as it comes; see ``Producer.stream``."""
        return self._jobs.stream(self.id, after, timeout, self._receipt)

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole output; see ``Producer.result``."""
        return await self._jobs.result(self.id, timeout, self._receipt)

    def watch(
        self,
        *,
        on_token: OnToken | None = None,
        on_done: OnDone | None = None,
        on_error: OnError | None = None,
        after: str | int = 0,
    ) -> AsyncWatch:
        """Call functions as the job goes on, and return at once; see ``Job.watch``.

        Each watch is a task of the running event loop; what a function returns is awaited if it can
        be.
        """
        watches = self._watches
        return watches.start(
            self._jobs, self.id, self._receipt, after, Callbacks(on_token, on_done, on_error)
        )

    async def cancel(self) -> JobState:
        """End the job now; see ``Producer.cancel``."""
        return await self._jobs.cancel(self.id)

    async def status(self) -> JobStatus:
        """Look at the job once; see ``Producer.job_status``."""
        return await self._jobs.status(self.id, self._receipt)
