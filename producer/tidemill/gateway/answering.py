"""From a plan to an answer: submit the jobs, wait or follow, tell what they produce."""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from tidemill._follow import Chunk
from tidemill._request import JobSpec
from tidemill.gateway.call import Call
from tidemill.gateway.disconnects import ClientGone, while_connected
from tidemill.gateway.errors import CLIENT_GONE_STATUS
from tidemill.gateway.jobs import Piece, RequestJobs, renamed, submit
from tidemill.gateway.pacing import paced
from tidemill.gateway.shaping.envelope import Envelope, fingerprint_of, usage_of
from tidemill.gateway.sse import EventStream, event
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import JobEnd, ModelCard, Usage
from tidemill.result import Result


class Events(Protocol):
    """Makes the events of one stream."""

    def of_chunk(self, job: int, chunk: Chunk) -> bytes:
        """Return the events that tell a chunk of one of the jobs; maybe none."""

    def of_end(self, job: int, end: JobEnd) -> bytes:
        """Return the events that tell how a job ended."""


class Shape(Protocol):
    """How an endpoint tells what jobs produced."""

    def body(self, results: Sequence[Result], envelope: Envelope) -> dict[str, Any]:
        """Return the whole answer, but for the usage."""

    def events(self, envelope: Envelope) -> Events:
        """Return the maker of a stream's events."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of the queue, and how it is told.

    ``kind`` and ``event_kind`` are the ``object`` of the body and of events, ``prompt_field`` the
    field of the request that jobs know as token ids, ``form_field`` that of the form of answers,
    ``limit_field`` that of their longest length.
    ``stream_interval`` is the least number of tokens of an event, but for the first and the last.
    ``late_events`` makes all events of a stream that can begin only when everything is known.
    """

    specs: Sequence[JobSpec]
    shape: Shape
    card: ModelCard
    model: str
    id_prefix: str
    kind: str
    event_kind: str
    prompt_field: str
    streams: bool = False
    late_events: Callable[[Sequence[Result], Envelope], bytes] | None = None
    includes_usage: bool = False
    form_field: str = "structured_outputs"
    limit_field: str = "max_tokens"
    stream_interval: int = 1

    def name_of(self, _: int, field: str) -> str:
        """Return what the request calls a field of its jobs."""
        if field.startswith("prompt_ids"):
            return field.replace("prompt_ids", self.prompt_field, 1)
        if field.removeprefix("params.") == "max_tokens":
            return self.limit_field
        return self.form_field if field.startswith("structured") else field


async def answer(call: Call, plan: Plan) -> Response:
    """Run a plan's jobs and tell their outputs, at once or as they come.

    Raises what submitting and waiting for jobs raise.
    """
    jobs = await _submit(call, plan)
    envelope = Envelope(
        id=f"{plan.id_prefix}-{jobs.ids[0]}",
        kind=plan.event_kind if plan.streams else plan.kind,
        created=int(time.time()),
        model=plan.model,
        fingerprint=fingerprint_of(plan.card),
    )
    if plan.streams:
        return EventStream(_stream(call, plan, jobs, envelope), owner=jobs)
    try:
        with jobs:
            async with while_connected(call.request.receive):
                results = await jobs.results()
    except ClientGone:
        return Response(status_code=CLIENT_GONE_STATUS)
    usage = note_usage(call, [result.usage for result in results])
    return json_response({**plan.shape.body(results, envelope), "usage": usage})


def json_response(body: dict[str, Any]) -> Response:
    """Return an answer with this body."""
    return Response(orjson.dumps(body), media_type="application/json")


async def _submit(call: Call, plan: Plan) -> RequestJobs:
    try:
        return await submit(call, plan.specs)
    except InvalidRequest as error:
        raise renamed(error, 0, plan.name_of) from None


async def _stream(
    call: Call, plan: Plan, jobs: RequestJobs, envelope: Envelope
) -> AsyncGenerator[bytes]:
    usages: list[Usage] = []
    if plan.late_events is not None:
        results = await jobs.results()
        usages += [result.usage for result in results]
        yield plan.late_events(results, envelope)
    else:
        async with aclosing(_events(call, plan, jobs, envelope, usages)) as events:
            async for data in events:
                yield data
    usage = note_usage(call, usages)
    if plan.includes_usage:
        yield event(orjson.dumps(envelope.around([], usage=usage)))


async def _events(
    call: Call, plan: Plan, jobs: RequestJobs, envelope: Envelope, usages: list[Usage]
) -> AsyncGenerator[bytes]:
    events, is_first = plan.shape.events(envelope), True
    least = max(plan.stream_interval, call.state.settings.stream_interval)
    async with aclosing(jobs.pieces()) as arrived, aclosing(paced(arrived, least)) as batches:
        async for pieces in batches:
            usages += [piece.end.usage for piece in pieces if piece.end is not None]
            data = _told(events, pieces)
            if not data:
                continue
            if is_first:
                is_first = False
                note_first_token(call)
            yield data


def _told(events: Events, pieces: Iterable[Piece]) -> bytes:
    told = []
    for piece in pieces:
        if piece.chunk is not None:
            told.append(events.of_chunk(piece.job, piece.chunk))
        if piece.end is not None:
            told.append(events.of_end(piece.job, piece.end))
    return b"".join(told)


def note_first_token(call: Call) -> None:
    """Count how long the first token of a stream took."""
    route = call.request.scope["route"].path
    seconds = time.monotonic() - call.began_at
    call.state.metrics.first_token_seconds.labels(route).observe(seconds)


def note_usage(call: Call, usages: Sequence[Usage]) -> dict[str, Any]:
    """Count the tokens of an answer; returns its usage."""
    usage = usage_of(usages)
    tokens = call.state.metrics.tokens
    tokens.labels("prompt").inc(usage["prompt_tokens"])
    tokens.labels("completion").inc(usage["completion_tokens"])
    tokens.labels("cached").inc(usage["prompt_tokens_details"]["cached_tokens"])
    return usage
