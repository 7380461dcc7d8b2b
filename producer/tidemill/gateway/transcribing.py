"""What requests for speech ask of the queue, and how their answers are told."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Literal

import orjson
from pydantic import ValidationError
from starlette.responses import PlainTextResponse, Response

from tidemill.gateway.audio_uploads import AudioForm, check_store, receive_audio
from tidemill.gateway.call import Call
from tidemill.gateway.checks import refuse
from tidemill.gateway.embedding import kind_options
from tidemill.gateway.errors import CLIENT_GONE_STATUS
from tidemill.gateway.jobs import RequestJobs, submit
from tidemill.gateway.kind_plans import results_of
from tidemill.gateway.openai_models.audio import TranscriptionRequest
from tidemill.gateway.shaping.audio import (
    TranscriptEvents,
    brief,
    subtitles_srt,
    subtitles_vtt,
    verbose,
)
from tidemill.gateway.sse import EventStream
from tidemill.job_kinds import TranscribeSpec
from tidemill.outcomes import transcription_of
from tidemill.protocol.errors import NoSuchObject
from tidemill.protocol.messages import invalid_request
from tidemill.protocol.requests import StoredAudio
from tidemill.result import Result

Task = Literal["transcribe", "translate"]

#: What a request calls the fields of its job.
_NAMES = {"audio": "file", "stored": "file"}


async def answer_speech(call: Call, task: Task) -> Response:
    """Write down what is said in the file of a request, at once or as it comes.

    Raises what reading the form, submitting and waiting for jobs raise.
    """
    form = await receive_audio(call)
    try:
        body = _parsed(form)
        jobs = await _submit(call, body, form, task)
    except BaseException:
        _forget(call, form)
        raise
    if body.stream:
        return EventStream(_stream(jobs), owner=_owning(call, form, jobs))
    with _forgetting(call, form, jobs):
        results = await results_of(call, jobs)
    if results is None:
        return Response(status_code=CLIENT_GONE_STATUS)
    return await _told(call, body, task, results[0])


async def _submit(
    call: Call, body: TranscriptionRequest, form: AudioForm, task: Task
) -> RequestJobs:
    if form.is_stored:
        await check_store(call, await call.producer.model(body.model))
    spec = TranscribeSpec(
        form.audio,
        **kind_options(body, call.idempotency_key),
        language=body.language,
        task=task,
        prompt=body.prompt,
        temperature=body.temperature,
        timestamps=_timestamps(body),
        live=body.stream,
    )
    return await submit(call, [spec], lambda _, field: _NAMES.get(field, field))


def _parsed(form: AudioForm) -> TranscriptionRequest:
    try:
        body = TranscriptionRequest.model_validate(form.fields)
    except ValidationError as error:
        raise invalid_request(error) from error
    if body.stream_include_usage:
        raise refuse("stream_include_usage", "streams of speech tell none", "Leave it out.")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise refuse("timestamp_granularities", "it goes with verbose_json alone")
    if body.stream and body.response_format not in ("json", "text"):
        raise refuse(
            "response_format",
            f"{body.response_format} is told at the end, not streamed",
            "Ask for json, or leave stream out.",
        )
    return body


def _granularities(body: TranscriptionRequest) -> list[str]:
    return list(body.timestamp_granularities or ("segment",))


def _timestamps(body: TranscriptionRequest) -> Literal["none", "segment", "word"]:
    if body.response_format in ("json", "text"):
        return "none"
    return "word" if "word" in _granularities(body) else "segment"


async def _told(call: Call, body: TranscriptionRequest, task: Task, result: Result) -> Response:
    found = transcription_of(result)
    match body.response_format:
        case "text":
            return PlainTextResponse(f"{found.text}\n")
        case "srt":
            return PlainTextResponse(subtitles_srt(found.segments))
        case "vtt":
            return PlainTextResponse(subtitles_vtt(found.segments))
        case "verbose_json":
            tokenizer = await call.producer.tokenizer(body.model)

            def encode(text: str) -> list[int]:
                return tokenizer.encode(text, add_special_tokens=False)

            return _json(verbose(found, task, _granularities(body), encode))
    return _json(brief(found))


async def _stream(jobs: RequestJobs) -> AsyncGenerator[bytes]:
    events = TranscriptEvents()
    async with aclosing(jobs.pieces()) as batches:
        async for pieces in batches:
            for piece in pieces:
                if piece.chunk is not None and (data := events.of_chunk(piece.chunk)):
                    yield data
                if piece.end is not None:
                    yield events.of_end(piece.end.usage)


@contextmanager
def _owning(call: Call, form: AudioForm, jobs: RequestJobs) -> Iterator[None]:
    with jobs, _forgetting(call, form, jobs):
        yield


@contextmanager
def _forgetting(call: Call, form: AudioForm, jobs: RequestJobs) -> Iterator[None]:
    """Delete the file at the end, unless the job is unfinished and somebody may come back."""
    try:
        yield
    finally:
        if not jobs.outlive or jobs.have_ended:
            _forget(call, form)


def _forget(call: Call, form: AudioForm) -> None:
    if isinstance(form.audio, StoredAudio):
        call.state.spawn(_delete(call, form.audio.file_id), "deleting the audio of a request")


async def _delete(call: Call, file_id: str) -> None:
    try:
        await call.state.batches(call.identity.tenant).delete_file(file_id)
    except NoSuchObject:
        return  # its time was over


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
