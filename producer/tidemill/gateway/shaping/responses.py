"""Responses as ``/v1/responses`` tells them: their fields, their items and how they ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.messages import JobEnd, Usage
from tidemill.protocol.states import FinishReason, JobState
from tidemill.responses.record import response_id

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_STATUS = {
    JobState.DONE: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.RUNNING: "in_progress",
    JobState.QUEUED: "queued",
    JobState.DELAYED: "queued",
}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response before anything is known of its output; ``fields`` are those of its request."""

    job_id: str
    fields: Mapping[str, Any]

    @property
    def is_background(self) -> bool:
        """Whether it runs although nobody waits."""
        return bool(self.fields["background"])

    def body(self, status: str, output: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """Return the object of the response."""
        told = {"error": None, "incomplete_details": None, "usage": None, **more}
        return {
            "id": response_id(self.job_id),
            "object": "response",
            **self.fields,
            "status": status,
            "output": list(output),
            **told,
        }

    def ended(
        self, end: JobEnd, output: Sequence[Any], num_tokens: int
    ) -> tuple[str, dict[str, Any]]:
        """Return the type of the last event, and the object; tokens count if the end has none."""
        status, more = status_of(JobState(end.state)), {}
        if status == "completed" and end.finish_reason == FinishReason.LENGTH:
            status, more = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        if status == "failed":
            more = {"error": _error(end)}
        usage = end.usage
        if usage == Usage():
            usage = Usage(completion_tokens=num_tokens)
        # What was cancelled has no event of its own, and has told a part of its output.
        kind = "incomplete" if status == "cancelled" else status
        return kind, self.body(status, output, usage=response_usage(usage), **more)


def status_of(state: JobState) -> str:
    """Return what the state of a job is called here, but for one that was cut off."""
    return _STATUS.get(state, "failed")


def response_usage(usage: Usage) -> dict[str, Any]:
    """Return the tokens of a response; those of reasoning are not counted apart."""
    cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def item_id(kind: str, job_id: str, place: int | str) -> str:
    """Return the id of an item of a response; whoever makes it again finds the same."""
    prefix = _PREFIXES.get(kind, "item")
    return f"{prefix}_{job_id.removeprefix('job_')}_{place}"


def with_ids(items: Sequence[Mapping[str, Any]], job_id: str) -> list[dict[str, Any]]:
    """Return items of an input with ids for those that have none."""
    return [
        {"id": item_id(item["type"], job_id, f"in{place}"), **item}
        for place, item in enumerate(items)
    ]


def _error(end: JobEnd) -> dict[str, str]:
    code = "invalid_prompt" if end.state == JobState.FAILED else "server_error"
    return {"code": code, "message": end.error or f"the job is {end.state}"}
