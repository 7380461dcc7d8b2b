"""``/v1/jobs``: work that nobody waits for, to be looked at and fetched later."""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from tidemill._follow import parse_position
from tidemill._reads import JobStatus
from tidemill.async_stream import AsyncTokenStream
from tidemill.gateway.answering import json_response
from tidemill.gateway.call import Call, CurrentCall
from tidemill.gateway.disconnects import ClientGone, while_connected
from tidemill.gateway.errors import CLIENT_GONE_STATUS
from tidemill.gateway.job_requests import plan_job
from tidemill.gateway.jobs import renamed
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.openai_models.jobs import (
    NOT_YET,
    STREAM,
    JobList,
    JobObject,
    JobRequest,
    JobResult,
    JobStateName,
    SubmittedJob,
)
from tidemill.gateway.shaping.jobs import (
    end_event,
    is_sealed,
    job_list,
    job_object,
    job_result,
    submitted,
    token_event,
)
from tidemill.gateway.sse import EventStream
from tidemill.job_list import DEFAULT_PAGE, MAX_PAGE
from tidemill.protocol.errors import (
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFinished,
    TidemillError,
)
from tidemill.result import Result, not_found

router = APIRouter(tags=["jobs"], route_class=JsonRoute)

#: How long a request for a result may wait; proxies seldom have more patience.
MAX_WAIT_SECONDS = 300.0


@router.post("/v1/jobs", status_code=202, response_model=SubmittedJob)
async def create_job(call: CurrentCall, body: JobRequest) -> Response:
    """Queue a job; it runs whether or not anybody follows it."""
    planned = await plan_job(call, body)
    [job] = await call.submit_many([planned.spec])
    if isinstance(job, TidemillError):
        call.account.settle_nothing()
        raise renamed(job, 0, planned.name_of)
    answer = json_response(submitted(await job.status(), job))
    answer.status_code = 202
    return answer


@router.get("/v1/jobs", response_model=JobList)
async def list_jobs(
    call: CurrentCall,
    status: Annotated[list[JobStateName] | None, Query()] = None,
    batch: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> Response:
    """List jobs, the newest first; go on behind `last_id` while `has_more`."""
    page = await call.producer.job_page(state=status, batch=batch, after=after, limit=limit)
    return json_response(job_list(page))


@router.get("/v1/jobs/{job_id}", response_model=JobObject)
async def get_job(call: CurrentCall, job_id: str) -> Response:
    """Look at a job."""
    return json_response(job_object(await _owned(call, job_id)))


@router.get("/v1/jobs/{job_id}/result", response_model=JobResult, responses=NOT_YET)
async def get_result(
    call: CurrentCall,
    job_id: str,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)] = 0.0,
) -> Response:
    """Return what a job has produced; 202 if it has not ended within ``wait`` seconds."""
    status = await _owned(call, job_id)
    if not status.state.is_terminal and not wait:
        return _not_yet(status)
    try:
        async with while_connected(call.request.receive):
            result = await _result(call, job_id, wait)
    except ClientGone:
        return Response(status_code=CLIENT_GONE_STATUS)
    except JobNotFinished:
        return _not_yet(await _owned(call, job_id))
    return json_response(job_result(result))


@router.get("/v1/jobs/{job_id}/stream", response_class=Response, responses=STREAM)
async def stream_job(
    call: CurrentCall,
    job_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: str | None = None,
) -> Response:
    """Follow a job, behind an event's id or a number of tokens, from the beginning without one."""
    await _owned(call, job_id)
    given = last_event_id or after or "0"
    position = int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else given
    if parse_position(position).is_end:
        # What makes a browser's EventSource stop asking again.
        return Response(status_code=204)
    stream = call.producer.stream(job_id, after=position)
    return EventStream(_events(stream), last=b"")


@router.post("/v1/jobs/{job_id}/cancel", response_model=JobObject)
@router.delete("/v1/jobs/{job_id}", response_model=JobObject)
async def cancel_job(call: CurrentCall, job_id: str) -> Response:
    """End a job now; what it produced is kept.  One that has ended stays as it is."""
    await _owned(call, job_id)
    await call.producer.cancel(job_id)
    return json_response(job_object(await _owned(call, job_id)))


async def _owned(call: Call, job_id: str) -> JobStatus:
    """Return the status of one of the caller's jobs; others are not found."""
    try:
        status = await call.producer.job_status(job_id)
    except InvalidRequest as error:
        raise not_found(job_id[:80]) from error
    if status.tenant != call.identity.tenant:
        raise not_found(job_id)
    return status


async def _result(call: Call, job_id: str, wait: float) -> Result:
    try:
        # What has ended is here at once, but not within no time at all.
        return await call.producer.result(job_id, timeout=wait or None)
    except (JobFailed, JobCancelled) as error:
        if not isinstance(error.result, Result):
            raise
        return error.result


def _not_yet(status: JobStatus) -> Response:
    answer = json_response(job_object(status))
    answer.status_code = 202
    return answer


async def _events(stream: AsyncTokenStream) -> AsyncGenerator[bytes]:
    last = None
    async with stream:
        try:
            async for chunk in stream:
                *chunks, newest = chunk, *stream.take_ready()
                if is_sealed(newest):
                    last = newest
                else:
                    chunks.append(newest)
                if chunks:
                    yield b"".join(map(token_event, chunks))
        except JobError:
            if stream.end is None:
                raise
        if stream.end is not None:
            yield end_event(stream.position, stream.end, last)
