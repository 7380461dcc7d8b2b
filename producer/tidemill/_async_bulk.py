"""``AsyncProducer.map``: many jobs, a bounded number of them at once."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable

from tidemill._async_submitter import AsyncSubmitter
from tidemill._receipt import Receipt
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill._window import Window
from tidemill.protocol.errors import BrokerError, Overloaded, TidemillError
from tidemill.result import Result

Outcome = Result | TidemillError
Items = Iterable[Prompt | JobSpec] | AsyncIterable[Prompt | JobSpec]


class AsyncBulk:
    """One run of ``map``; ``abandoned`` names the unfinished jobs that nobody could find again.

    One task fetches items, one submits, in order, all that were fetched meanwhile, and one waits
    for each job by way of ``wait``.
    """

    def __init__(
        self,
        submitter: AsyncSubmitter,
        wait: Callable[[Receipt], Awaitable[Result]],
        items: Items,
        options: JobOptions,
        window: Window[Outcome],
    ) -> None:
        self._submitter = submitter
        self._wait = wait
        self._source = _as_specs(items, options)
        self._window = window
        self._pending: list[tuple[int, JobSpec]] = []
        self._is_exhausted = self._is_fetching = self._is_submitting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        self.abandoned: set[str] = set()

    async def run(self) -> AsyncGenerator[Outcome, None]:
        """Submit, wait and yield until every item has its outcome."""
        try:
            while True:
                # More may end while the caller handles an outcome.
                while outcomes := self._window.pop():
                    for outcome in outcomes:
                        yield outcome
                if self._failure is not None:
                    raise self._failure
                self._fetch_next()
                if self._is_exhausted and self._window.is_empty:
                    return
                await self._progress.wait()
                self._progress.clear()
        finally:
            await self._stop()

    def _fetch_next(self) -> None:
        if self._window.has_room and not self._is_fetching and not self._is_exhausted:
            self._is_fetching = True
            self._spawn(self._fetch())

    async def _fetch(self) -> None:
        spec = await anext(self._source, None)
        self._is_fetching = False
        if spec is None:
            self._is_exhausted = True
            return
        self._pending.append((self._window.start(), spec))
        if not self._is_submitting:
            self._is_submitting = True
            self._spawn(self._submit())

    async def _submit(self) -> None:
        while batch := self._pending:
            self._pending = []
            receipts = await self._receipts([spec for _, spec in batch])
            refused, wait_seconds = [], 0.0
            for (index, spec), receipt in zip(batch, receipts, strict=True):
                if isinstance(receipt, Overloaded):
                    refused.append((index, spec))
                    wait_seconds = receipt.retry_after_seconds
                else:
                    self._take(index, receipt)
            self._progress.set()
            if refused:
                self._pending = refused + self._pending
                await asyncio.sleep(wait_seconds)
        self._is_submitting = False

    async def _receipts(self, specs: list[JobSpec]) -> list[Receipt | TidemillError]:
        task = asyncio.ensure_future(self._submitter.submit_many(specs))
        try:
            receipts = await asyncio.shield(task)
        except asyncio.CancelledError:
            # What the broker has accepted by now must be known to be cancelled there.
            self._note_jobs(specs, await task)
            raise
        self._note_jobs(specs, receipts)
        return receipts

    def _note_jobs(self, specs: list[JobSpec], receipts: list[Receipt | TidemillError]) -> None:
        for spec, receipt in zip(specs, receipts, strict=True):
            if isinstance(receipt, Receipt) and not spec.has_key:
                self.abandoned.add(receipt.job_id)

    def _take(self, index: int, receipt: Receipt | TidemillError) -> None:
        if isinstance(receipt, TidemillError):
            self._window.finish(index, receipt)
        else:
            self._spawn(self._await(index, receipt))

    async def _await(self, index: int, receipt: Receipt) -> None:
        try:
            self._window.finish(index, await self._wait(receipt))
        except BrokerError:
            raise
        except TidemillError as error:
            self._window.finish(index, error)
        self.abandoned.discard(receipt.job_id)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
        self._progress.set()

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._source.aclose()


async def _as_specs(items: Items, options: JobOptions) -> AsyncGenerator[JobSpec, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield JobSpec.of(item, options)
    else:
        for item in items:
            yield JobSpec.of(item, options)
