"""What is called as a job goes on, and the task that calls it."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tidemill._async_jobs import AsyncJobs
from tidemill._follow import Chunk
from tidemill._receipt import Receipt
from tidemill.async_stream import AsyncTokenStream
from tidemill.protocol.errors import InvalidRequest, JobCancelled, JobFailed, TidemillError
from tidemill.result import Result

_LOGGER = logging.getLogger("tidemill")

T = TypeVar("T")

OnToken = Callable[[Chunk], object]
OnDone = Callable[[Result], object]
OnError = Callable[[TidemillError], object]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """At least one function; each may return an awaitable, which is awaited."""

    on_token: OnToken | None
    on_done: OnDone | None
    on_error: OnError | None

    def __post_init__(self) -> None:
        given = [f for f in (self.on_token, self.on_done, self.on_error) if f is not None]
        if not given or not all(map(callable, given)):
            raise InvalidRequest(
                "watch: it needs functions to call",
                field="on_done",
                fix="Give one or more of on_token, on_done and on_error.",
            )


async def attend(
    jobs: AsyncJobs, job_id: str, receipt: Receipt | None, after: str | int, calls: Callbacks
) -> None:
    """Call what is to be called until the job has ended; raises what that raises."""
    try:
        failure = None
        if calls.on_token is not None:
            async with jobs.stream(job_id, after, None, receipt) as stream:
                failure = await _tell_tokens(stream, calls.on_token)
        outcome = failure or await _outcome(jobs, job_id, receipt)
        if isinstance(outcome, Result):
            await _call(calls.on_done, outcome)
        elif calls.on_error is not None:
            await _call(calls.on_error, outcome)
        else:
            _LOGGER.warning("watch: %s", outcome.one_line())
    except Exception:
        # Perhaps nobody waits for this watch.
        _LOGGER.exception("watch: a callback of %s has failed", job_id)
        raise


async def _tell_tokens(stream: AsyncTokenStream, on_token: OnToken) -> TidemillError | None:
    while True:
        try:
            chunk = await anext(stream)
        except (StopAsyncIteration, JobFailed, JobCancelled):
            # The result tells how it ended, with all that there is.
            return None
        except TidemillError as error:
            return error
        await _call(on_token, chunk)


async def _outcome(jobs: AsyncJobs, job_id: str, receipt: Receipt | None) -> Result | TidemillError:
    try:
        return await jobs.result(job_id, None, receipt)
    except TidemillError as error:
        return error


async def _call(function: Callable[[T], object] | None, argument: T) -> None:
    told = None if function is None else function(argument)
    if inspect.isawaitable(told):
        await told
