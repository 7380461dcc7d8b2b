"""Jobs, their results and their streams as ``/v1/jobs`` tells them."""

from typing import Any

import orjson

from tidemill._follow import Chunk
from tidemill._reads import SEAL, JobStatus
from tidemill.async_job import AsyncJob
from tidemill.gateway.shaping.envelope import usage_of
from tidemill.job_list import JobPage
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.states import JobState
from tidemill.result import Choice, Result


def job_object(status: JobStatus) -> dict[str, Any]:
    """Return the object of a job."""
    return {
        "id": status.job_id,
        "object": "job",
        "status": _state(status.state),
        "model": status.model,
        "priority": status.priority,
        "created_at": _seconds(status.submitted_ms),
        "ready_at": _seconds(status.ready_ms),
        "deadline_at": _seconds(status.deadline_ms),
        "started_at": _seconds(status.dispatched_ms),
        "first_token_at": _seconds(status.first_token_ms),
        "ended_at": _seconds(status.ended_ms),
        "num_tokens": status.num_tokens,
        "attempts": status.attempts,
        "num_retries": status.num_retries,
        "max_retries": status.max_retries,
        "finish_reason": status.finish_reason,
        "error": status.error,
        "batch": status.batch,
        "parent": status.parent,
        "metadata": status.metadata or None,
    }


def job_list(page: JobPage) -> dict[str, Any]:
    """Return a page of jobs."""
    return {
        "object": "list",
        "data": [job_object(status) for status in page.jobs],
        "first_id": page.jobs[0].job_id if page.jobs else None,
        "last_id": page.last_id,
        "has_more": page.has_more,
    }


def submitted(status: JobStatus, job: AsyncJob) -> dict[str, Any]:
    """Return the object of a job that has just been accepted."""
    return {**job_object(status), "is_new": job.is_new, "estimated_wait": job.estimated_wait}


def job_result(result: Result) -> dict[str, Any]:
    """Return what a job has produced."""
    told: dict[str, Any] = {
        "id": result.job_id,
        "object": "job.result",
        "status": _state(result.state),
        "error": result.error,
        "usage": usage_of([result.usage]),
    }
    if result.outcome is None or result.outcome.transcript is not None:
        told["choices"] = [_choice(choice) for choice in result.choices]
    if result.outcome is not None:
        told |= _outcome(result.outcome)
    return told


def token_event(chunk: Chunk) -> bytes:
    """Return the event of a chunk; its id resumes the stream behind it."""
    return _event("token", chunk.event_id, _tokens(chunk))


def is_sealed(chunk: Chunk) -> bool:
    """Whether a chunk is of the entry that ends its log."""
    return chunk.event_id.startswith(f"{SEAL}-")


def end_event(position: int, end: JobEnd, last: Chunk | None) -> bytes:
    """Return the last event, with the tokens that came with the end; nothing follows its id.

    One event for both: who has seen the tokens has seen the end.
    """
    told: dict[str, Any] = {
        **_tokens(last or Chunk(position, position, (), "", "")),
        "status": _state(end.state),
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
        "error": end.error,
        "usage": usage_of([end.usage]),
    }
    if end.choices:
        told["choices"] = [choice.model_dump() for choice in end.choices]
    return _event("end", f"{SEAL}-{position}", told)


def _event(kind: str, event_id: str, told: dict[str, Any]) -> bytes:
    head = f"id: {event_id}\nevent: {kind}\ndata: ".encode()
    return head + orjson.dumps(told) + b"\n\n"


def _tokens(chunk: Chunk) -> dict[str, Any]:
    told: dict[str, Any] = {
        "start": chunk.start,
        "end": chunk.end,
        "choice": chunk.choice,
        "token_ids": chunk.ids,
        "text": chunk.text,
    }
    if chunk.logprobs is not None:
        told["logprobs"] = [entry.model_dump() for entry in chunk.logprobs]
    return told


def _state(state: str) -> str:
    return "running" if state == JobState.RUNNING else state


def _choice(choice: Choice) -> dict[str, Any]:
    told: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        told["logprobs"] = [entry.model_dump() for entry in choice.logprobs]
    return told


def _outcome(outcome: Outcome) -> dict[str, Any]:
    if outcome.vectors is not None:
        return {"embeddings": outcome.vectors.rows()}
    if outcome.scores is not None:
        return {"scores": outcome.scores}
    return {"transcript": None if outcome.transcript is None else outcome.transcript.model_dump()}


def _seconds(unix_ms: int | None) -> float | None:
    return None if unix_ms is None else unix_ms / 1000
