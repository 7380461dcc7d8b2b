"""The asynchronous twin of ``tidemill.job_batch``."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self, Unpack, overload

from tidemill._async_link import AsyncLink
from tidemill._async_submitter import AsyncSubmitter
from tidemill._best_of import Clock, first_error
from tidemill._collection import Collection
from tidemill._receipt import Receipt
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill._sweep import cancel_batch, cancel_jobs
from tidemill.async_job import AsyncJob
from tidemill.batch import BatchStatus, CancelCounts, batch_status
from tidemill.protocol.errors import (
    BrokerError,
    JobCancelled,
    JobFailed,
    JobNotFound,
    ProtocolError,
    TidemillError,
)
from tidemill.protocol.keys import ShardKeys
from tidemill.result import Result


class AsyncJobBatch:
    """Jobs collected by ``submit`` and queued in groups; see ``JobBatch``.  Belongs to one task."""

    def __init__(
        self,
        collection: Collection[AsyncJob],
        submitter: AsyncSubmitter,
        link: AsyncLink,
        place: tuple[ShardKeys, str],
        handle: Callable[[Receipt], AsyncJob],
        *,
        return_exceptions: bool,
    ) -> None:
        self._collection = collection
        self._submitter = submitter
        self._link = link
        self._keys, self._tenant = place
        self._handle = handle
        self._return_exceptions = return_exceptions

    @property
    def name(self) -> str | None:
        """The name under which its jobs are counted, None if they are not."""
        return self._collection.name

    @property
    def jobs(self) -> list[AsyncJob | TidemillError]:
        """The jobs that were sent, in the order of ``submit``; an error stands for a refusal."""
        return self._collection.outcomes

    @property
    def ids(self) -> list[str]:
        """The ids of the jobs that were queued, in the order of ``submit``."""
        return [job.id for job in self.jobs if isinstance(job, AsyncJob)]

    async def submit(self, prompt: Prompt | JobSpec, **options: Unpack[JobOptions]) -> int:
        """Collect a job, and send a group if one is full; returns its place in ``jobs``.

        Raises ``InvalidRequest`` at once for what is wrong whatever the model, and what ``send``
        raises.
        """
        place = self._collection.add(prompt, options)
        if self._collection.is_full:
            await self.send()
        return place

    async def send(self) -> None:
        """Queue what was collected; a full queue is waited for.

        Raises the error of the first job that is refused, unless it stands in ``jobs`` by
        ``return_exceptions``; and ``BrokerUnavailable``: then it may be called again, and no job
        is queued twice.
        """
        collection = self._collection
        while specs := collection.next_specs():
            if not collection.made:
                collection.made = list(await self._submitter.make(specs))
            receipts = await self._submitter.send(collection.made)
            refused, seconds = collection.take(receipts, self._handle)
            if refused and not self._return_exceptions:
                raise refused[0]
            await asyncio.sleep(seconds)

    @overload
    async def results(
        self, timeout: float | None = ..., *, return_exceptions: Literal[False] = ...
    ) -> list[Result]: ...

    @overload
    async def results(
        self, timeout: float | None = ..., *, return_exceptions: Literal[True]
    ) -> list[Result | TidemillError]: ...

    async def results(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[Result] | list[Result | TidemillError]:
        """Wait for all jobs that were sent, in the order of ``submit``.

        Raises the first error, or puts each into its place.  ``timeout`` bounds the whole wait, in
        seconds; after it ``JobNotFinished`` is raised.
        """
        clock = Clock(timeout)
        outcomes = [await _outcome(job, clock) for job in self.jobs]
        error = None if return_exceptions else first_error(outcomes)
        if error is not None:
            raise error
        return outcomes

    async def status(self) -> BatchStatus:
        """Count the jobs of its name once, of other clients too; raises without a name."""
        name = self._collection.required_name
        return await self._link.read(batch_status(self._keys, self._tenant, name))

    async def cancel(self) -> CancelCounts:
        """End all jobs of its name now, and let no more into it; without one, those queued here.

        Their partial output is kept.  What was not sent is not sent any more.
        """
        if self.name is None:
            counts = await self._undo()
        else:
            self._submitter.fates.cancel_all(batch=self.name)
            counts = await self._link.carry_out(cancel_batch(self._keys, self._tenant, self.name))
        self._collection.forget()
        return counts

    async def _undo(self) -> CancelCounts:
        unsure = self._collection.unsure()
        if unsure:
            # However far the sending got: once this is answered, nothing of it is on its way.
            await self._submitter.send(unsure)
        ids = [*self._collection.unkeyed_ids(), *(job.job_id for job in unsure)]
        for job_id in ids:
            self._submitter.fates.cancel(job_id)
        return await self._link.carry_out(cancel_jobs(self._keys, ids))

    async def _fail(self, error: BaseException) -> None:
        if isinstance(error, BrokerError):
            error.add_note(self._collection.cut_off(error))
            return
        try:
            counts = await self._undo()
        except BrokerError as failure:
            error.add_note(self._collection.cut_off(failure))
        else:
            error.add_note(self._collection.undone(counts))
            self._collection.forget()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            await self._fail(error)
            return
        try:
            await self.send()
        except BaseException as failure:
            await self._fail(failure)
            raise


async def _outcome(job: AsyncJob | TidemillError, clock: Clock) -> Result | TidemillError:
    if isinstance(job, TidemillError):
        return job
    try:
        return await job.result(clock.left)
    except (JobFailed, JobCancelled, JobNotFound, ProtocolError) as error:
        return error
