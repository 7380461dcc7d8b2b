"""The jobs of one request: submitted together, followed together, and given up together."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tidemill._follow import Chunk
from tidemill._request import JobSpec
from tidemill.async_job import AsyncJob
from tidemill.gateway.call import Call
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    TidemillError,
)
from tidemill.protocol.messages import JobEnd, Usage
from tidemill.result import Result

T = TypeVar("T")

#: Jobs of one request that are looked for before others have their turn.
_BEGUN_AT_ONCE = 32


def _same_name(_: int, field: str) -> str:
    return field


@dataclass(frozen=True, slots=True)
class Piece:
    """What one of the jobs produced next, or how it ended."""

    job: int
    chunk: Chunk | None = None
    end: JobEnd | None = None


class RequestJobs:
    """A context manager: jobs that are unfinished where it is left early are cancelled.

    But for those that ``outlive`` it: with an idempotency key, because whoever sends the request
    again finds them, and with a callback, which tells somebody else of them.
    """

    def __init__(self, call: Call, jobs: Sequence[AsyncJob], *, outlive: bool) -> None:
        self._state, self._account = call.state, call.account
        self._jobs = jobs
        self.outlive = outlive
        self._unfinished = set(range(len(jobs)))

    @property
    def ids(self) -> list[str]:
        """The jobs' ids, in the order of the request."""
        return [job.id for job in self._jobs]

    @property
    def have_ended(self) -> bool:
        """Whether nothing of them is left to be done."""
        return not self._unfinished

    async def results(self) -> list[Result]:
        """Wait for all results; raises the first error that stands for one."""
        if len(self._jobs) == 1:
            return [await self._result(0)]
        async with self._each(self._result) as tasks:
            return [await task for task in tasks]

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """Yield what the jobs produce as it comes, all at once that has come; raises as above."""
        if len(self._jobs) == 1:
            async with aclosing(self._follow(0)) as single:
                async for pieces in single:
                    yield pieces
            return
        arrived: asyncio.Queue[list[Piece] | BaseException] = asyncio.Queue()
        async with self._each(partial(self._pass_on, arrived=arrived)):
            num_ended = 0
            while num_ended < len(self._jobs):
                pieces = _joined(await arrived.get(), arrived)
                num_ended += sum(piece.end is not None for piece in pieces)
                yield pieces

    def give_up(self) -> None:
        """Cancel what is unfinished, in the background, unless it outlives the request."""
        if not self.outlive:
            self.cancel()

    def cancel(self) -> None:
        """Cancel what is unfinished, in the background."""
        if not self._unfinished:
            return
        jobs = [self._jobs[index] for index in self._unfinished]
        self._state.spawn(_cancel(self._state, jobs), "cancelling jobs of a client that left")

    def __enter__(self) -> "RequestJobs":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.give_up()

    @asynccontextmanager
    async def _each(
        self, work: Callable[[int], Coroutine[Any, Any, T]]
    ) -> AsyncGenerator[list[asyncio.Task[T]]]:
        """Do something for each job, until the context is left."""
        tasks: list[asyncio.Task[T]] = []
        try:
            for index in range(len(self._jobs)):
                tasks.append(asyncio.create_task(work(index)))
                if index % _BEGUN_AT_ONCE == 0:
                    # Others have their turn.
                    await asyncio.sleep(0)
            yield tasks
        finally:
            for task in tasks:
                task.cancel()

    async def _result(self, index: int) -> Result:
        try:
            result = await self._jobs[index].result()
        except JobError as error:
            self._note_end(index, _usage_of(error))
            raise
        self._note_end(index, result.usage)
        return result

    def _note_end(self, index: int, usage: Usage | None) -> None:
        self._unfinished.discard(index)
        if usage is not None:
            self._account.settle(self._jobs[index].id, usage)

    async def _follow(self, index: int) -> AsyncGenerator[list[Piece]]:
        async with self._jobs[index].stream() as stream:
            try:
                async for chunk in stream:
                    more = stream.take_ready()
                    yield [Piece(index, each) for each in (chunk, *more)]
            except JobError:
                self._note_end(index, stream.end.usage if stream.end else None)
                raise
            self._note_end(index, stream.end.usage if stream.end else None)
            yield [Piece(index, end=stream.end)]

    async def _pass_on(
        self, index: int, arrived: "asyncio.Queue[list[Piece] | BaseException]"
    ) -> None:
        try:
            async for pieces in self._follow(index):
                arrived.put_nowait(pieces)
        except Exception as error:
            # Whatever it is: nothing else would end the wait for this job.
            arrived.put_nowait(error)


async def submit(
    call: Call, specs: Sequence[JobSpec], name_of: Callable[[int, str], str] = _same_name
) -> RequestJobs:
    """Queue a request's jobs, all or none; raises the first error.

    ``name_of`` turns the place of a job and one of its fields into what the request calls it.
    """
    outcomes = await call.submit_many(specs)
    accepted = [job for job in outcomes if isinstance(job, AsyncJob)]
    has_key = call.idempotency_key is not None
    outlive = has_key or any(spec.has_callback for spec in specs)
    jobs = RequestJobs(call, accepted, outlive=outlive)
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, TidemillError):
            call.account.settle_nothing()
            # With a key somebody may come back for them, but not if it is another request's.
            if not has_key or isinstance(outcome, IdempotencyConflict):
                jobs.cancel()
            raise renamed(outcome, index, name_of)
    return jobs


def renamed(error: TidemillError, index: int, name_of: Callable[[int, str], str]) -> TidemillError:
    """Return the error with the request's name of the field of the job that is wrong."""
    if isinstance(error, InvalidRequest) and error.field:
        name = name_of(index, error.field)
        error.message = error.message.replace(error.field, name, 1)
        error.field = name
    return error


def _usage_of(error: JobError) -> Usage | None:
    result = error.result if isinstance(error, JobFailed | JobCancelled) else None
    return result.usage if isinstance(result, Result) else None


def _joined(
    first: list[Piece] | BaseException, arrived: "asyncio.Queue[list[Piece] | BaseException]"
) -> list[Piece]:
    pieces: list[Piece] = []
    while True:
        if isinstance(first, BaseException):
            raise first
        pieces += first
        if arrived.empty():
            return pieces
        first = arrived.get_nowait()


async def _cancel(state: GatewayState, jobs: Sequence[AsyncJob]) -> None:
    for job in jobs:
        with suppress(JobError):
            await job.cancel()
            state.metrics.cancelled_jobs.inc()
