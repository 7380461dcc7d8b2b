"""Results and streams as ``/v1/messages`` tells them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tidemill.gateway.errors import ApiError
from tidemill.openai.chat import Parser
from tidemill.openai.deltas import Delta, ToolCall, call_id
from tidemill.protocol.messages import JobEnd, Usage
from tidemill.protocol.states import FinishReason
from tidemill.result import Result

#: What errors are called there, by their status.
_ERRORS = {
    400: "invalid_request_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message(result: Result, parser: Parser, model: str) -> dict[str, Any]:
    """Return a whole answer."""
    delta = parser.feed(result.text) + parser.finish()
    blocks: list[dict[str, Any]] = []
    if delta.reasoning:
        blocks.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
    if delta.content and (delta.content.strip() or not delta.tool_calls):
        blocks.append({"type": "text", "text": delta.content})
    for index, call in enumerate(delta.tool_calls):
        arguments = orjson.loads(call.arguments)
        blocks.append({**_tool_block(result.job_id, index, call), "input": arguments})
    reason = (result.finish_reason, result.stop_reason)
    return {
        **_envelope(result.job_id, model),
        "content": blocks,
        **_stop(*reason, has_calls=bool(delta.tool_calls)),
        "usage": message_usage(result.usage),
    }


def message_usage(usage: Usage) -> dict[str, int]:
    """Return the tokens of an answer."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which failed."""
    kind = _ERRORS.get(error.status, "api_error")
    return _event("error", error={"type": kind, "message": error.message})


@dataclass(slots=True)
class MessageEvents:
    """Turns what a job produces into the events of one stream, block after block."""

    job_id: str
    model: str
    num_prompt: int
    parser: Parser
    _kind: str = ""
    _index: int = -1
    _num_calls: int = field(default=0)

    def start(self) -> bytes:
        """Return the event that begins the answer."""
        usage = message_usage(Usage(prompt_tokens=self.num_prompt))
        told: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message={**_envelope(self.job_id, self.model), **told})

    def of_text(self, text: str) -> bytes:
        """Return the events that tell more of the output; maybe none."""
        return self._tell(self.parser.feed(text))

    def of_end(self, end: JobEnd) -> bytes:
        """Return the events that tell how the answer ended."""
        told = self._tell(self.parser.finish()) + self._close()
        stop = _stop(end.finish_reason, end.stop_reason, has_calls=self._num_calls > 0)
        told += _event("message_delta", delta=stop, usage=message_usage(end.usage))
        return told + _event("message_stop")

    def _tell(self, delta: Delta) -> bytes:
        told = b""
        if delta.reasoning:
            told += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            told += self._delta(type="thinking_delta", thinking=delta.reasoning)
        if delta.content and (self._kind == "text" or delta.content.strip() or not self._num_calls):
            told += self._open("text", {"type": "text", "text": ""})
            told += self._delta(type="text_delta", text=delta.content)
        return told + self._call(delta.tool_calls)

    def _call(self, calls: Sequence[ToolCall]) -> bytes:
        told = b""
        for call in calls:
            block = {**_tool_block(self.job_id, self._num_calls, call), "input": {}}
            told += self._close() + self._open("tool_use", block)
            told += self._delta(type="input_json_delta", partial_json=call.arguments)
            self._num_calls += 1
        return told

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind, self._index = kind, self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._index)

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _envelope(job_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{job_id}", "type": "message", "role": "assistant", "model": model}


def _tool_block(job_id: str, index: int, call: ToolCall) -> dict[str, Any]:
    name = call_id(job_id, index).replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": name, "name": call.name}


def _stop(finish: str | None, stop: str | int | None, *, has_calls: bool) -> dict[str, Any]:
    sequence = stop if isinstance(stop, str) else None
    if has_calls and finish == FinishReason.STOP:
        reason, sequence = "tool_use", None
    elif finish == FinishReason.LENGTH:
        reason, sequence = "max_tokens", None
    else:
        reason = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _event(kind: str, **told: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **told}) + b"\n\n"
