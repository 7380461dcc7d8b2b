"""Responses, as they are made, and as they are told again."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response

from tidemill._reads import JobStatus
from tidemill.async_job import AsyncJob
from tidemill.async_stream import AsyncTokenStream
from tidemill.gateway.answering import json_response, note_first_token, note_usage
from tidemill.gateway.call import Call
from tidemill.gateway.chatting import is_long
from tidemill.gateway.checks import refuse
from tidemill.gateway.disconnects import ClientGone, while_connected
from tidemill.gateway.errors import CLIENT_GONE_STATUS, api_error
from tidemill.gateway.jobs import RequestJobs, renamed
from tidemill.gateway.openai_models.responses import ResponseRequest
from tidemill.gateway.response_plans import ResponsePlan, plan_response, request_name
from tidemill.gateway.shaping.logprobs import TokenNames
from tidemill.gateway.shaping.response_events import ResponseEvents
from tidemill.gateway.shaping.responses import ResponseHead, status_of, with_ids
from tidemill.gateway.sse import EventStream
from tidemill.openai.response_items import input_items
from tidemill.openai.stored_readings import stored_chat_job
from tidemill.protocol.errors import InvalidRequest, JobError, NoSuchObject, TidemillError
from tidemill.protocol.messages import JobEnd
from tidemill.responses.record import ResponseRecord, job_of, no_response, response_id
from tidemill.responses.store import ResponseStore
from tidemill.result import failure_of
from tidemill.service.offload import beside_loop

_log = logging.getLogger(__name__)


class _Leave:
    """Gives up the job of a client that leaves, unless it runs in the background."""

    def __init__(self, call: Call, jobs: RequestJobs, run: "_Run", *, is_background: bool) -> None:
        self._call, self._jobs, self._run = call, jobs, run
        self._is_background = is_background

    def __enter__(self) -> "_Leave":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._run.end is not None or self._is_background:
            return
        self._jobs.give_up()
        if not self._jobs.outlive:
            _let_go(self._call, self._run)


class _Run:
    """One pass over what a job produces, from its first token to its ``end``."""

    def __init__(self, stream: AsyncTokenStream, events: ResponseEvents) -> None:
        self._stream, self.events = stream, events
        self.end: JobEnd | None = None

    async def told(self) -> AsyncGenerator[bytes]:
        """Yield the events as they come; raises what following a job raises but its failure."""
        yield self.events.start()
        async with self._stream as stream:
            try:
                async for chunk in stream:
                    chunks = [chunk, *stream.take_ready()]
                    yield b"".join(map(self.events.of_chunk, chunks))
            except JobError:
                if stream.end is None:
                    raise
        self.end = stream.end
        if self.end is not None:
            yield self.events.of_end(self.end)

    async def body(self) -> dict[str, Any]:
        """Return the whole response, when the job has ended."""
        async with aclosing(self.told()) as told:
            async for _ in told:
                continue
        assert self.events.body is not None, "the job has ended"
        return self.events.body


async def create_response(call: Call, body: ResponseRequest) -> Response:
    """Continue a conversation; raises what submitting and waiting for jobs raise."""
    items = await conversation_of(call, body)
    plan = await plan_response(call, body, items, idempotency_key=call.idempotency_key)
    # What cannot be kept is refused before it runs.
    data = await asyncio.to_thread(plan.record.encode) if body.store else None
    job = await _submitted(call, plan)
    outlives = call.idempotency_key is not None or plan.spec.has_callback
    jobs = RequestJobs(call, [job], outlive=outlives)
    record = plan.record
    if data is not None:
        record = await _kept(call, data, job, jobs) or record
    events = plan.events(job.id, record)
    if body.background and not body.stream:
        # It may have ended meanwhile, most of all if its key was sent before.
        return json_response(await _body(call, job.id, record, await job.status()))
    run = _Run(job.stream(), events)
    leave = _Leave(call, jobs, run, is_background=body.background)
    if body.stream:
        return EventStream(
            _stream(call, run), owner=leave, last=b"", error_event=run.events.of_error
        )
    try:
        with leave:
            async with while_connected(call.request.receive):
                told = await run.body()
    except ClientGone:
        return Response(status_code=CLIENT_GONE_STATUS)
    return json_response(_succeeded(call, run, told))


async def count_tokens(call: Call, body: ResponseRequest) -> int:
    """Return the length of the prompt that a request comes to; raises ``InvalidRequest``."""
    plan = await plan_response(call, body, await conversation_of(call, body))
    return len(plan.style.prompt_ids)


async def retrieve_response(call: Call, given: str) -> Response:
    """Tell a response again, as far as it is."""
    job_id, record, status = await found(call, given)
    return json_response(await _body(call, job_id, record, status))


async def replay_response(call: Call, given: str, after: int) -> Response:
    """Stream a response from its beginning, without the events up to the number ``after``."""
    job_id, record, _ = await found(call, given)
    events = await _events(call, job_id, record)
    events.after = after
    run = _Run(call.producer.stream(job_id), events)
    return EventStream(_stream(call, run), last=b"", error_event=events.of_error)


async def cancel_response(call: Call, given: str) -> Response:
    """End a response now; one that has ended stays as it is."""
    job_id, record, _ = await found(call, given)
    await call.producer.cancel(job_id)
    status = await call.producer.job_status(job_id)
    return json_response(await _body(call, job_id, record, status))


async def delete_response(call: Call, given: str) -> Response:
    """Forget a response; if it still runs it ends."""
    job_id, _, status = await found(call, given)
    if not status.state.is_terminal:
        await call.producer.cancel(job_id)
    await _store(call).delete(job_id)
    return json_response({"id": response_id(job_id), "object": "response", "deleted": True})


async def found(call: Call, given: str) -> tuple[str, ResponseRecord, JobStatus]:
    """Return job, record and status of one of the caller's responses; raises ``NoSuchObject``."""
    job_id = job_of(given)
    record = await _store(call).get(job_id)
    try:
        status = await call.producer.job_status(job_id)
    except JobError as error:
        raise no_response(given) from error
    return job_id, record, status


async def conversation_of(call: Call, body: ResponseRequest) -> list[Mapping[str, Any]]:
    """Return all that the model is to read, the oldest first; raises ``InvalidRequest``."""
    history, make = await _history(call, body), partial(input_items, body.input)
    return [*history, *(await beside_loop(make) if is_long(call) else make())]


async def _history(call: Call, body: ResponseRequest) -> list[Mapping[str, Any]]:
    given, name = body.previous_response_id, "previous_response_id"
    if given is None:
        return []
    try:
        job_id, record, status = await found(call, given)
    except NoSuchObject as error:
        raise refuse(name, f"there is no response {given[:80]!r}") from error
    if not status.state.is_terminal:
        raise refuse(name, f"{given} has not ended", "Wait for it.")
    told = await _body(call, job_id, record, status)
    return [*with_ids(record.items, job_id), *told["output"]]


async def _submitted(call: Call, plan: ResponsePlan) -> AsyncJob:
    [job] = await call.submit_many([plan.spec])
    if isinstance(job, TidemillError):
        call.account.settle_nothing()
        raise renamed(job, 0, request_name) if isinstance(job, InvalidRequest) else job
    return job


async def _kept(call: Call, data: bytes, job: AsyncJob, jobs: RequestJobs) -> ResponseRecord | None:
    try:
        return await _store(call).put(job.id, data)
    except BaseException:
        # Nobody has heard of it, so nobody would find it, but who sends the request again.
        if call.idempotency_key is None:
            jobs.cancel()
        raise


async def _events(call: Call, job_id: str, record: ResponseRecord) -> ResponseEvents:
    names = None
    if record.reading["logprobs"]:
        tokenizer = await call.producer.tokenizer(str(record.fields["model"]))
        names = TokenNames(call.state.token_texts(tokenizer))
    parser = stored_chat_job(record.reading).parser()
    return ResponseEvents(ResponseHead(job_id, record.fields), parser, names)


async def _body(
    call: Call, job_id: str, record: ResponseRecord, status: JobStatus
) -> dict[str, Any]:
    if not status.state.is_terminal:
        return ResponseHead(job_id, record.fields).body(status_of(status.state))
    told = await _Run(call.producer.stream(job_id), await _events(call, job_id, record)).body()
    await _store(call).note_end(job_id)
    return told


async def _stream(call: Call, run: _Run) -> AsyncGenerator[bytes]:
    is_first = True
    try:
        async with aclosing(run.told()) as told:
            async for data in told:
                if is_first and data and run.events.has_output:
                    is_first = False
                    note_first_token(call)
                if data:
                    yield data
    except Exception as error:
        # The status has been told, and clients of this API look for an event of their own.
        problem = api_error(error)
        if problem.code == "internal_error":
            _log.exception("a stream failed")
        yield run.events.of_error(problem)
        return
    if run.end is not None:
        _note_end(call, run, run.end)


def _succeeded(call: Call, run: _Run, told: dict[str, Any]) -> dict[str, Any]:
    assert run.end is not None, "the response is whole"
    _note_end(call, run, run.end)
    if (error := failure_of(run.events.head.job_id, run.end)) is not None:
        raise error
    return told


def _note_end(call: Call, run: _Run, end: JobEnd) -> None:
    note_usage(call, [end.usage])
    call.account.settle(run.events.head.job_id, end.usage)
    _let_go(call, run)


def _let_go(call: Call, run: _Run) -> None:
    """Let the record go with its job, in the background: nobody has to wait for that."""
    if run.events.head.fields["store"]:
        work = _store(call).note_end(run.events.head.job_id)
        call.state.spawn(work, "letting the record of a response go with its job")


def _store(call: Call) -> ResponseStore:
    return call.state.responses(call.identity.tenant)
