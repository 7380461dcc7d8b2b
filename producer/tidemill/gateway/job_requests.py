"""What a request for a job that nobody waits for asks of the queue."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tidemill._request import JobOptions, JobSpec
from tidemill.gateway.audio_uploads import check_store, stored_audio
from tidemill.gateway.call import Call
from tidemill.gateway.chatting import plan_chat
from tidemill.gateway.checks import refuse
from tidemill.gateway.completing import plan_completion
from tidemill.gateway.embedding import kind_options, plan_embeddings
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.openai_models.completions import CompletionRequest
from tidemill.gateway.openai_models.embeddings import EmbeddingRequest
from tidemill.gateway.openai_models.jobs import JobRequest, SpeechJobRequest
from tidemill.gateway.openai_models.scores import RerankRequest
from tidemill.gateway.scoring import plan_ranking
from tidemill.job_kinds import TranscribeSpec
from tidemill.protocol.messages import invalid_request

Model = TypeVar("Model", bound=BaseModel)

#: Options of ``TermOptions`` that are fields of the request.
_TERMS = ("delay", "max_queue", "stall_timeout", "max_retries", "batch", "callback_url", "metadata")


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job, and what the request calls its fields, given their names in a job."""

    spec: JobSpec
    name_of: Callable[[int, str], str]


async def plan_job(call: Call, body: JobRequest) -> PlannedJob:
    """Return the job of a request; raises ``InvalidRequest`` naming the field that is wrong."""
    fields = dict(body.model_extra or {})
    # The token log of a job is followed live unless that is declined; see ``_terms``.
    fields.pop("stream_options", None)
    match body.kind:
        case "generate":
            planned = await _generate(call, fields)
        case "embed":
            embed = _parsed(EmbeddingRequest, fields)
            plan = await plan_embeddings(call.producer, embed, call.idempotency_key)
            planned = PlannedJob(plan.specs[0], plan.name_of)
        case "score":
            plan = await plan_ranking(call, _parsed(RerankRequest, fields))
            planned = PlannedJob(plan.specs[0], plan.name_of)
        case "transcribe":
            planned = await _speech(call, body, _parsed(SpeechJobRequest, fields))
    return PlannedJob(planned.spec.with_options(_terms(body)), planned.name_of)


async def _generate(call: Call, fields: dict[str, Any]) -> PlannedJob:
    if "messages" in fields:
        plan = await plan_chat(call, _parsed(ChatRequest, fields))
    else:
        plan = await plan_completion(call, _parsed(CompletionRequest, fields))
    if len(plan.specs) != 1:
        raise refuse("prompt", "a job has one", "Send a request for each.")
    return PlannedJob(plan.specs[0], plan.name_of)


async def _speech(call: Call, job: JobRequest, body: SpeechJobRequest) -> PlannedJob:
    if (body.audio is None) == (body.file_id is None):
        raise refuse("audio", "exactly one of audio and file_id is needed")
    audio: Any = body.audio
    if body.file_id is not None:
        audio = await stored_audio(call, body.file_id)
        await check_store(call, await call.producer.model(body.model))
    spec = TranscribeSpec(
        audio,
        **kind_options(body, call.idempotency_key),
        language=body.language,
        task=body.task,
        prompt=body.prompt,
        temperature=body.temperature,
        timestamps=body.timestamps,
        live=job.stream,
    )
    return PlannedJob(spec, lambda _, field: "file_id" if field.startswith("stored") else field)


def _terms(body: JobRequest) -> JobOptions:
    given = {name: getattr(body, name) for name in _TERMS}
    terms: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    terms["stream"] = body.stream
    options: JobOptions = terms  # type: ignore[assignment]  # checked where the job is made
    return options


def _parsed(model: type[Model], fields: dict[str, Any]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error) from error
