"""The jobs of one request: submitted together, followed together, and given up together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from tidemill._follow import Chunk
from tidemill._request import JobSpec
from tidemill.async_client import AsyncProducer
from tidemill.async_job import AsyncJob
from tidemill.gateway.call import Call
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import JobError, TidemillError
from tidemill.protocol.messages import JobEnd
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class Piece:
    """What one of the jobs produced next, or how it ended."""

    job: int
    chunk: Chunk | None = None
    end: JobEnd | None = None


class RequestJobs:
    """A context manager: jobs that are unfinished where it is left early are cancelled.

    But for those with an idempotency key: whoever sends the request again finds them.
    """

    def __init__(self, state: GatewayState, jobs: Sequence[AsyncJob], *, has_key: bool) -> None:
        self._state = state
        self._jobs = jobs
        self._has_key = has_key
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
        tasks = [asyncio.create_task(self._result(index)) for index in range(len(self._jobs))]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """Yield what the jobs produce as it comes, all at once that has come; raises as above."""
        if len(self._jobs) == 1:
            async with aclosing(self._follow(0)) as single:
                async for pieces in single:
                    yield pieces
            return
        arrived: asyncio.Queue[list[Piece] | BaseException] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._pass_on(index, arrived)) for index in range(len(self._jobs))
        ]
        try:
            num_ended = 0
            while num_ended < len(self._jobs):
                pieces = _joined(await arrived.get(), arrived)
                num_ended += sum(piece.end is not None for piece in pieces)
                yield pieces
        finally:
            for task in tasks:
                task.cancel()

    def give_up(self) -> None:
        """Cancel what is unfinished, in the background."""
        if self._has_key or not self._unfinished:
            return
        jobs = [self._jobs[index] for index in self._unfinished]
        self._state.spawn(_cancel(self._state, jobs), "cancelling jobs of a client that left")

    def __enter__(self) -> "RequestJobs":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.give_up()

    async def _result(self, index: int) -> Result:
        try:
            result = await self._jobs[index].result()
        except JobError:
            self._unfinished.discard(index)
            raise
        self._unfinished.discard(index)
        return result

    async def _follow(self, index: int) -> AsyncGenerator[list[Piece]]:
        async with self._jobs[index].stream() as stream:
            try:
                async for chunk in stream:
                    more = stream.take_ready()
                    yield [Piece(index, each) for each in (chunk, *more)]
            except JobError:
                self._unfinished.discard(index)
                raise
            self._unfinished.discard(index)
            yield [Piece(index, end=stream.end)]

    async def _pass_on(
        self, index: int, arrived: "asyncio.Queue[list[Piece] | BaseException]"
    ) -> None:
        try:
            async for pieces in self._follow(index):
                arrived.put_nowait(pieces)
        except TidemillError as error:
            arrived.put_nowait(error)


async def submit(call: Call, specs: Sequence[JobSpec]) -> RequestJobs:
    """Queue a request's jobs, all or none; raises the first error."""
    producer: AsyncProducer = call.producer
    outcomes = await producer.submit_many(specs)
    accepted = [job for job in outcomes if isinstance(job, AsyncJob)]
    jobs = RequestJobs(call.state, accepted, has_key=call.idempotency_key is not None)
    for outcome in outcomes:
        if isinstance(outcome, TidemillError):
            jobs.give_up()
            raise outcome
    return jobs


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
