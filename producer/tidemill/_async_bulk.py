"""``AsyncProducer.map``: many jobs, a bounded number of them at once."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
)
from contextlib import aclosing, closing, suppress
from typing import Any, TypeVar

from tidemill._async_link import AsyncLink
from tidemill._async_submitter import AsyncSubmitter
from tidemill._map_run import Flight, MapRun, Outcome, note_leftovers
from tidemill._receipt import Receipt
from tidemill._sweep import cancel_jobs
from tidemill.protocol.errors import BrokerError, Overloaded, TidemillError
from tidemill.protocol.keys import ShardKeys
from tidemill.result import Result

T = TypeVar("T")
Items = Iterable[T] | AsyncIterable[T]

_NO_MORE = object()


class AsyncBulk:
    """One run of ``map``.

    One task fetches items, one submits, in order, all that were fetched meanwhile, and one waits
    for each job by way of ``wait``.
    """

    def __init__(
        self,
        link: AsyncLink,
        keys: ShardKeys,
        submitter: AsyncSubmitter,
        wait: Callable[[Receipt], Awaitable[Result]],
        items: Items[Any],
        run: MapRun,
    ) -> None:
        self._link = link
        self._keys = keys
        self._submitter = submitter
        self._wait = wait
        self._source = _each(items)
        self._run = run
        self._pending: list[Flight] = []
        self._is_exhausted = self._is_fetching = self._is_submitting = self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        #: Ids of the unfinished jobs that nobody could find again.
        self._lost: set[str] = set()

    async def outcomes(self) -> AsyncGenerator[tuple[Any, Outcome], None]:
        """Submit, wait and yield until every item has its outcome."""
        run = self._run
        with closing(run):
            try:
                run.touch()
                while not self._is_closed:
                    # More may end while the caller handles an outcome.
                    while pairs := run.pop():
                        for pair in pairs:
                            yield pair
                            # What the caller does with it is not the queue's silence.
                            run.touch()
                    if self._failure is not None:
                        raise self._failure
                    self._fetch_next()
                    if self._is_exhausted and run.is_empty:
                        return
                    await self._progress_made()
            finally:
                await self._stop()

    async def close(self) -> None:
        """End the run in the place of whoever iterates over it, perhaps nobody any more."""
        self._is_closed = True
        await self._stop()
        await self.abandon()

    async def abandon(self) -> None:
        """Cancel what is under way and what nobody could find again."""
        for job_id in self._lost:
            self._submitter.fates.cancel(job_id)
        await self._link.carry_out(cancel_jobs(self._keys, list(self._lost)))
        self._lost.clear()

    async def _progress_made(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._run.seconds_left()):
                await self._progress.wait()
        self._progress.clear()

    def _fetch_next(self) -> None:
        if self._run.has_room and not self._is_fetching and not self._is_exhausted:
            self._is_fetching = True
            self._spawn(self._fetch())

    async def _fetch(self) -> None:
        item = await anext(self._source, _NO_MORE)
        self._is_fetching = False
        if item is _NO_MORE:
            self._is_exhausted = True
        elif (flight := self._run.start(item)) is not None:
            self._send(flight)

    def _send(self, flight: Flight) -> None:
        self._pending.append(flight)
        if not self._is_submitting:
            self._is_submitting = True
            self._spawn(self._submit())

    async def _submit(self) -> None:
        while batch := self._pending:
            self._pending = []
            receipts = await self._receipts(batch)
            refused, wait_seconds = [], 0.0
            for flight, receipt in zip(batch, receipts, strict=True):
                if isinstance(receipt, Overloaded):
                    refused.append(flight)
                    wait_seconds = receipt.retry_after_seconds
                elif isinstance(receipt, TidemillError):
                    self._run.finish(flight.index, receipt)
                else:
                    self._spawn(self._await(flight, receipt))
            self._progress.set()
            if refused:
                self._pending = refused + self._pending
                await asyncio.sleep(wait_seconds)
        self._is_submitting = False

    async def _receipts(self, batch: list[Flight]) -> list[Receipt | TidemillError]:
        task = asyncio.ensure_future(self._submitter.submit_many([flight.spec for flight in batch]))
        try:
            receipts = await asyncio.shield(task)
        except asyncio.CancelledError:
            # What the broker has accepted by now must be known to be cancelled there.
            self._note_jobs(batch, await task)
            raise
        self._note_jobs(batch, receipts)
        return receipts

    def _note_jobs(self, batch: list[Flight], receipts: list[Receipt | TidemillError]) -> None:
        for flight, receipt in zip(batch, receipts, strict=True):
            if isinstance(receipt, Receipt) and not flight.spec.has_key:
                self._lost.add(receipt.job_id)

    async def _await(self, flight: Flight, receipt: Receipt) -> None:
        outcome: Outcome
        try:
            outcome = await self._wait(receipt)
        except BrokerError:
            raise
        except TidemillError as error:
            outcome = error
        self._lost.discard(receipt.job_id)
        again = self._run.end(flight, outcome, is_new=receipt.created)
        if again is not None:
            self._send(again)

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


async def deliver(
    bulk: AsyncBulk, live: set[AsyncBulk], *, return_exceptions: bool, with_items: bool
) -> AsyncGenerator[Any, None]:
    """Yield what ``map`` does; however it ends early, nothing of it goes on unheeded.

    ``bulk`` is among the ``live`` meanwhile: an asynchronous generator that is dropped is closed
    some time later, perhaps after the producer.
    """
    live.add(bulk)
    try:
        async with aclosing(bulk.outcomes()) as outcomes:
            async for item, outcome in outcomes:
                if isinstance(outcome, TidemillError) and not return_exceptions:
                    raise outcome
                yield (item, outcome) if with_items else outcome
    except BrokerError:
        raise
    except BaseException as error:
        try:
            await bulk.abandon()
        except BrokerError as failure:
            note_leftovers(error, failure)
        raise
    finally:
        live.discard(bulk)


async def _each(items: Items[T]) -> AsyncGenerator[T, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
