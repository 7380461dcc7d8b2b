"""Callbacks of jobs for the synchronous client: all of them on one thread of the producer."""

import asyncio
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from tidemill._async_jobs import AsyncJobs
from tidemill._async_link import AsyncLinks
from tidemill._async_submitter import AsyncSubmitter
from tidemill._callbacks import Callbacks, attend
from tidemill._checks import check_job_id, check_timeout
from tidemill._endpoint import Endpoint
from tidemill._follow import parse_position
from tidemill._receipt import Receipt
from tidemill.protocol.errors import JobNotFinished
from tidemill.protocol.ids import shard_of
from tidemill.service.tokenizer_cache import TokenizerStore


class Watch:
    """One job whose callbacks are called until it has ended; made by ``Job.watch``."""

    def __init__(self, job_id: str, future: "Future[None]") -> None:
        self._job_id = job_id
        self._future = future

    @property
    def job_id(self) -> str:
        """The job that is watched."""
        return self._job_id

    @property
    def is_over(self) -> bool:
        """Whether nothing is called any more."""
        return self._future.done()

    def stop(self) -> None:
        """Call nothing more than what is being called now; the job goes on."""
        self._future.cancel()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last callback has returned, or ``stop`` was called.

        Raises what a callback has raised, or ``JobNotFinished`` after ``timeout`` seconds.
        """
        check_timeout(timeout)
        if not wait_for([self._future], timeout).done:
            raise JobNotFinished(f"{self._job_id} is not finished yet", job_id=self._job_id)
        if not self._future.cancelled():
            self._future.result()


class Watches:
    """The watches of one client, on one thread that runs from the first of them on."""

    def __init__(self, endpoint: Endpoint, timeout: float, *, replicated: bool) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._replicated = replicated
        self._lock = threading.Lock()
        self._thread: _WatchThread | None = None

    def start(
        self, job_id: str, receipt: Receipt | None, after: str | int, calls: Callbacks
    ) -> Watch:
        """Begin to watch a job; raises ``InvalidRequest``."""
        check_job_id(job_id)
        parse_position(after)
        shard_of(job_id)
        with self._lock:
            if self._thread is None:
                self._thread = _WatchThread(self._endpoint, self._timeout, self._replicated)
            return Watch(job_id, self._thread.start(job_id, receipt, after, calls))

    def close(self) -> None:
        """End all watches, once what is being called now has returned."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()


class _WatchThread:
    def __init__(self, endpoint: Endpoint, timeout: float, replicated: bool) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._replicated = replicated
        self._links: AsyncLinks | None = None
        self._jobs: AsyncJobs | None = None
        self._loop = asyncio.new_event_loop()
        # Whoever leaves the program without closing the producer does not wait for its jobs.
        self._thread = threading.Thread(target=self._run, name="tidemill-watch", daemon=True)
        self._thread.start()

    def start(
        self, job_id: str, receipt: Receipt | None, after: str | int, calls: Callbacks
    ) -> "Future[None]":
        work = self._attend(job_id, receipt, after, calls)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        # A callback may close its producer.
        if self._thread is not threading.current_thread():
            self._thread.join()

    async def _attend(
        self, job_id: str, receipt: Receipt | None, after: str | int, calls: Callbacks
    ) -> None:
        await attend(self._jobs or self._connect(), job_id, receipt, after, calls)

    def _connect(self) -> AsyncJobs:
        self._links = links = AsyncLinks(self._endpoint, self._timeout)
        store = TokenizerStore(self._endpoint.cache_dir)
        submitter = AsyncSubmitter(links.home, self._endpoint, store, replicated=self._replicated)
        self._jobs = AsyncJobs(links, submitter)
        return self._jobs

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._links is not None:
            await self._links.close()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
