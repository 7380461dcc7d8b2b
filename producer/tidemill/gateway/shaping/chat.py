"""Results and streams as ``/v1/chat/completions`` tells them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tidemill._follow import Chunk
from tidemill.gateway.shaping.envelope import Envelope, TextEvent, usage_fields
from tidemill.gateway.shaping.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from tidemill.openai.chat import ChatJob, Parser
from tidemill.openai.deltas import Delta, ToolCall, call_id
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.states import FinishReason
from tidemill.result import Choice, Result

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What a request wants told of each choice; ``job`` reads what the model wrote."""

    job: ChatJob
    names: TokenNames | None = None
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    has_ids: bool = False
    has_reasoning: bool = True
    tells_usage: bool = False
    prompt_ids: Sequence[int] = ()

    def shown(self, delta: Delta) -> Delta:
        """Return what of a delta is told."""
        if self.has_reasoning or not delta.reasoning:
            return delta
        return Delta(delta.content, "", delta.tool_calls)


def chat_choices(result: Result, style: ChatStyle) -> list[dict[str, Any]]:
    """Return all choices of a job."""
    return [_choice(result.job_id, choice, style) for choice in result.choices]


def chat_prompt_fields(result: Result, style: ChatStyle) -> dict[str, Any]:
    """Return what vLLM's clients may ask to be told of the prompt."""
    told: dict[str, Any] = {}
    if style.has_ids:
        told["prompt_token_ids"] = list(style.prompt_ids)
    if style.has_prompt_logprobs and style.names is not None and result.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(
            result.prompt_ids, result.prompt_logprobs, style.names
        )
    return told


def _choice(job_id: str, choice: Choice, style: ChatStyle) -> dict[str, Any]:
    parser = style.job.parser()
    delta = style.shown(parser.feed(choice.text) + parser.finish())
    told: dict[str, Any] = {
        "index": choice.index,
        "message": _message(job_id, choice.index, delta),
        "logprobs": None,
        "finish_reason": _finish_reason(choice.finish_reason, bool(delta.tool_calls)),
        "stop_reason": choice.stop_reason,
    }
    if style.has_logprobs and style.names is not None:
        told["logprobs"] = chat_logprobs(choice.token_ids, choice.logprobs or (), style.names)
    if style.has_ids:
        told["token_ids"] = list(choice.token_ids)
    return told


def _message(job_id: str, choice: int, delta: Delta) -> dict[str, Any]:
    content = delta.content if delta.content or not delta.tool_calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if delta.reasoning:
        message |= _reasoning(delta.reasoning)
    if delta.tool_calls:
        message["tool_calls"] = _calls(job_id, choice, 0, delta.tool_calls)
    return message


def _reasoning(text: str) -> dict[str, str]:
    # Clients look for the one or the other.
    return {"reasoning": text, "reasoning_content": text}


def _calls(job_id: str, choice: int, first: int, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    source = job_id if choice == 0 else f"{job_id}/{choice}"
    return [
        {
            "id": call_id(source, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls, first)
    ]


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return TOOL_CALLS if has_calls and reason == FinishReason.STOP else reason


@dataclass(slots=True)
class _ChoiceState:
    event: TextEvent
    parser: Parser
    num_tokens: int = 0
    num_calls: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class ChatEvents:
    """Turns what a job produces into the events of one stream."""

    envelope: Envelope
    style: ChatStyle
    job_id: str
    _choices: dict[int, _ChoiceState] = field(default_factory=dict)

    def of_chunk(self, job: int, chunk: Chunk) -> bytes:
        """Return the events that tell a chunk."""
        state = self._state(chunk.choice)
        opening = self._open(chunk.choice, state)
        state.num_tokens += len(chunk.ids)
        delta = self.style.shown(state.parser.feed(chunk.text))
        style = self.style
        more: dict[str, Any] = {}
        if style.has_logprobs and style.names is not None:
            more["logprobs"] = chat_logprobs(chunk.ids, chunk.logprobs or (), style.names)
        if style.has_ids:
            more["token_ids"] = list(chunk.ids)
        return opening + self._tell(chunk.choice, state, delta, more)

    def of_end(self, job: int, end: JobEnd) -> bytes:
        """Return the events that tell how the choices ended."""
        reasons = [(each.finish_reason, each.stop_reason) for each in end.choices]
        if not reasons:
            reasons = [(end.finish_reason, end.stop_reason)]
        told = b""
        for index, (reason, stop) in enumerate(reasons):
            state = self._state(index)
            told += self._open(index, state)
            told += self._tell(index, state, self.style.shown(state.parser.finish()), {})
            finish = _finish_reason(reason, state.num_calls > 0)
            told += self._event(index, state, {}, finish_reason=finish, stop_reason=stop)
        return told

    def _state(self, index: int) -> _ChoiceState:
        state = self._choices.get(index)
        if state is None:
            event = self.envelope.text_event(
                b'{"index":%d,"delta":{"content":' % index,
                b'},"logprobs":null,"finish_reason":null}',
            )
            state = self._choices[index] = _ChoiceState(event, self.style.job.parser())
        return state

    def _open(self, index: int, state: _ChoiceState) -> bytes:
        if state.has_begun:
            return b""
        state.has_begun = True
        delta = {"role": "assistant", "content": ""}
        more: dict[str, Any] = {}
        if self.style.has_ids and index == 0:
            more["prompt_token_ids"] = list(self.style.prompt_ids)
        return self._event(index, state, delta, more)

    def _tell(self, index: int, state: _ChoiceState, delta: Delta, more: dict[str, Any]) -> bytes:
        if not (delta.reasoning or delta.tool_calls or more or self.style.tells_usage):
            return state.event.of(delta.content) if delta.content else b""
        if not delta and not more:
            return b""
        told: dict[str, Any] = {"content": delta.content} if delta.content else {}
        if delta.reasoning:
            told |= _reasoning(delta.reasoning)
        if delta.tool_calls:
            calls = _calls(self.job_id, index, state.num_calls, delta.tool_calls)
            told["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(calls, state.num_calls)
            ]
            state.num_calls += len(calls)
        return self._event(index, state, told, **more)

    def _event(
        self,
        index: int,
        state: _ChoiceState,
        delta: dict[str, Any],
        outside: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **more,
        }
        told = dict(outside or {})
        if self.style.tells_usage:
            told["usage"] = usage_fields(len(self.style.prompt_ids), state.num_tokens)
        return b"data: %b\n\n" % orjson.dumps(self.envelope.around([choice], **told))
