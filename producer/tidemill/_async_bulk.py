"""``AsyncProducer.map``: many jobs, a bounded number of them at once, one task each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable

from tidemill._async_submitter import AsyncSubmitter
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill._window import Window
from tidemill.protocol.calls import Submitted
from tidemill.protocol.errors import BrokerError, JobError, QueueFull, TidemillError
from tidemill.result import Result

Outcome = Result | TidemillError
Items = Iterable[Prompt | JobSpec] | AsyncIterable[Prompt | JobSpec]


class AsyncBulk:
    """One run of ``map``; ``in_flight`` names its unfinished jobs.

    ``wait`` waits for one job's result.
    """

    def __init__(
        self,
        submitter: AsyncSubmitter,
        wait: Callable[[str], Awaitable[Result]],
        items: Items,
        options: JobOptions,
        window: Window[Outcome],
    ) -> None:
        self._submitter = submitter
        self._wait = wait
        self._source = _as_async(items)
        self._options = options
        self._window = window
        self._pull: asyncio.Task[Prompt | JobSpec | None] | None = None
        self._is_exhausted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight: set[str] = set()

    async def run(self) -> AsyncGenerator[Outcome, None]:
        """Submit, wait and yield until every item has its outcome."""
        try:
            while True:
                for outcome in self._window.pop():
                    yield outcome
                if not self._next_pull() and not self._tasks:
                    return
                await self._progress()
        finally:
            await self._stop()

    def _next_pull(self) -> bool:
        """Begin to fetch the next item if it may start; false if there is none to wait for."""
        if self._pull is None and self._window.has_room and not self._is_exhausted:
            self._pull = asyncio.ensure_future(anext(self._source, None))
        return self._pull is not None

    async def _progress(self) -> None:
        """Wait until an item was fetched or a job ended."""
        waited = self._tasks if self._pull is None else {*self._tasks, self._pull}
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is self._pull:
                self._start(await self._pull)
            else:
                self._tasks.discard(task)
                await task

    def _start(self, item: Prompt | JobSpec | None) -> None:
        self._pull = None
        if item is None:
            self._is_exhausted = True
            return
        spec = JobSpec.of(item, self._options)
        self._tasks.add(asyncio.create_task(self._run_one(self._window.start(), spec)))

    async def _run_one(self, index: int, spec: JobSpec) -> None:
        try:
            self._window.finish(index, await self._result_of(spec))
        except BrokerError:
            raise
        except TidemillError as error:
            self._window.finish(index, error)

    async def _result_of(self, spec: JobSpec) -> Result:
        job_id = await self._submit(spec)
        self.in_flight.add(job_id)
        try:
            result = await self._wait(job_id)
        except JobError:
            self.in_flight.discard(job_id)
            raise
        self.in_flight.discard(job_id)
        return result

    async def _submit(self, spec: JobSpec) -> str:
        while True:
            [receipt] = await self._submitter.submit_many([spec])
            if isinstance(receipt, Submitted):
                return receipt.job_id
            if not isinstance(receipt, QueueFull):
                raise receipt
            await asyncio.sleep(receipt.retry_after_seconds)

    async def _stop(self) -> None:
        tasks = [*self._tasks, *([self._pull] if self._pull else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._source.aclose()


async def _as_async(items: Items) -> AsyncGenerator[Prompt | JobSpec, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
