"""The asynchronous twin of ``tidemill.watch``: a task for each watched job."""

import asyncio

from tidemill._async_jobs import AsyncJobs
from tidemill._callbacks import Callbacks, attend
from tidemill._checks import check_job_id, check_timeout
from tidemill._follow import parse_position
from tidemill._receipt import Receipt
from tidemill.protocol.errors import JobNotFinished
from tidemill.protocol.ids import shard_of


class AsyncWatch:
    """One job whose callbacks are called until it has ended; see ``Watch``."""

    def __init__(self, job_id: str, task: "asyncio.Task[None]") -> None:
        self._job_id = job_id
        self._task = task

    @property
    def job_id(self) -> str:
        """The job that is watched."""
        return self._job_id

    @property
    def is_over(self) -> bool:
        """Whether nothing is called any more."""
        return self._task.done()

    def stop(self) -> None:
        """Call nothing more, and cancel what is awaited of a callback; the job goes on."""
        self._task.cancel()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until the last callback has returned, or ``stop`` was called; see ``Watch``."""
        check_timeout(timeout)
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        if not done:
            raise JobNotFinished(f"{self._job_id} is not finished yet", job_id=self._job_id)
        if not self._task.cancelled():
            self._task.result()


class AsyncWatches:
    """The watches of one client."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self,
        jobs: AsyncJobs,
        job_id: str,
        receipt: Receipt | None,
        after: str | int,
        calls: Callbacks,
    ) -> AsyncWatch:
        """Begin to watch a job; raises ``InvalidRequest``."""
        check_job_id(job_id)
        parse_position(after)
        shard_of(job_id)
        task = asyncio.create_task(attend(jobs, job_id, receipt, after, calls))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return AsyncWatch(job_id, task)

    async def close(self) -> None:
        """End all watches."""
        # A callback may close its producer.
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # It was logged; nobody need wait for a watch to be told.
            task.exception()
