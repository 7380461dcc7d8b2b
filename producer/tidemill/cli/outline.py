"""What a dead job was asked for, without the words of the prompt unless they are asked for."""

from datetime import UTC, datetime
from typing import Any

from tidemill._reads import JobStatus
from tidemill.dead_letters import DeadJob
from tidemill.protocol.messages import GenerateRequest
from tidemill.protocol.requests import EmbedRequest, Request, ScoreRequest


def outline(job: DeadJob, *, with_prompt: bool) -> dict[str, Any]:
    """Return the facts about a dead job as plain data; few or none if it is not kept any more."""
    facts: dict[str, Any] = {}
    if job.status is not None:
        facts |= _of_status(job.status)
    if job.request is not None:
        facts |= _of_request(job.request)
        if with_prompt:
            facts |= _prompt(job.request)
    return facts


def when(unix_ms: int) -> str:
    """Return a time for people and programs."""
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{unix_ms} ms"  # no year that a calendar has


def _of_status(status: JobStatus) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "submitted": when(status.submitted_ms),
        "priority": status.priority,
        "generated_tokens": status.num_tokens,
        "retries": f"{status.num_retries} of {status.max_retries}",
        "error": status.error,
        "batch": status.batch,
        "parent": status.parent,
    }


def _of_request(request: Request) -> dict[str, Any]:
    if not isinstance(request, GenerateRequest):
        return {"kind": request.kind, "model": request.model, "prompt_size": _kind_size(request)}
    return {
        "model": request.model,
        "prompt_size": _size(request),
        "params": request.params.model_dump(exclude_defaults=True, exclude={"stop"}),
        "stop_strings": len(request.params.stop),
    }


def _kind_size(request: Request) -> str:
    if isinstance(request, EmbedRequest):
        return f"{len(request.inputs)} inputs"
    if isinstance(request, ScoreRequest):
        return f"{len(request.documents)} documents"
    return f"{len(getattr(request, 'audio', b''))} bytes of audio"


def _size(request: GenerateRequest) -> str:
    if request.prompt_ids is not None:
        return f"{len(request.prompt_ids)} token ids"
    if request.messages is not None:
        num_chars = sum(len(turn.content) for turn in request.messages)
        return f"{len(request.messages)} messages of {num_chars} characters"
    return f"{len(request.prompt or '')} characters"


def _prompt(request: Request) -> dict[str, Any]:
    if not isinstance(request, GenerateRequest):
        return request.model_dump(include={"inputs", "query", "documents", "prompt"})
    fields = request.model_dump(include={"prompt", "prompt_ids", "messages"}, exclude_none=True)
    return {**fields, "stop": list(request.params.stop)}
