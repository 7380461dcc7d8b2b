"""Results and streams as ``/v1/completions`` tells them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tidemill._follow import Chunk
from tidemill.gateway.shaping.envelope import Envelope, TextEvent, usage_fields
from tidemill.gateway.shaping.logprobs import CompletionTokens, TokenNames, prompt_logprobs
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd
from tidemill.result import Choice, Result


@dataclass(frozen=True, slots=True)
class CompletionStyle:
    """What a request wants told of each choice.

    ``texts`` and ``prompt_ids`` are those of its prompts, in order, where they are wanted.
    ``tells_output`` is false for a request that wants its prompt scored and nothing else.
    """

    num_choices: int = 1
    names: TokenNames | None = None
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    has_ids: bool = False
    has_echo: bool = False
    tells_output: bool = True
    tells_usage: bool = False
    texts: Sequence[str] = ()
    prompt_ids: Sequence[Sequence[int]] = ()

    def echo(self, job: int) -> str:
        """What a choice of this prompt begins with."""
        return self.texts[job] if self.has_echo else ""


def completion_choices(results: Sequence[Result], style: CompletionStyle) -> list[dict[str, Any]]:
    """Return all choices, those of the first prompt first."""
    return [
        _choice(job, result, choice, style)
        for job, result in enumerate(results)
        for choice in result.choices
    ]


def _choice(job: int, result: Result, choice: Choice, style: CompletionStyle) -> dict[str, Any]:
    ids, text, logprobs = choice.token_ids, choice.text, choice.logprobs or ()
    if not style.tells_output:
        ids, text, logprobs = (), "", ()
    told: dict[str, Any] = {
        "index": job * style.num_choices + choice.index,
        "text": style.echo(job) + text,
        "logprobs": _logprobs(job, result, ids, logprobs, style),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if style.has_ids:
        told |= {"token_ids": list(ids), "prompt_token_ids": list(style.prompt_ids[job])}
    if style.has_prompt_logprobs and style.names is not None and result.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(
            result.prompt_ids, result.prompt_logprobs, style.names
        )
    return told


def _logprobs(
    job: int,
    result: Result,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    style: CompletionStyle,
) -> dict[str, Any] | None:
    if not style.has_logprobs or style.names is None:
        return None
    told = CompletionTokens(style.names)
    if style.has_echo and result.prompt_logprobs is not None:
        return told.take(
            (*result.prompt_ids, *ids), (*result.prompt_logprobs, *logprobs[: len(ids)])
        )
    told.offset = len(style.echo(job))
    return told.take(ids, logprobs[: len(ids)])


@dataclass(slots=True)
class _ChoiceState:
    event: TextEvent
    tokens: CompletionTokens | None
    num_tokens: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class CompletionEvents:
    """Turns what jobs produce into the events of one stream."""

    envelope: Envelope
    style: CompletionStyle
    _choices: dict[int, _ChoiceState] = field(default_factory=dict)

    def of_chunk(self, job: int, chunk: Chunk) -> bytes:
        """Return the events that tell a chunk."""
        index = job * self.style.num_choices + chunk.choice
        state = self._state(index)
        opening = b"" if state.has_begun else self._open(job, index, state)
        state.num_tokens += len(chunk.ids)
        if not self.style.tells_output:
            return opening
        style = self.style
        if not (style.has_logprobs or style.has_ids or style.tells_usage):
            return opening + (state.event.of(chunk.text) if chunk.text else b"")
        more: dict[str, Any] = {"token_ids": list(chunk.ids)} if style.has_ids else {}
        if state.tokens is not None:
            more["logprobs"] = state.tokens.take(chunk.ids, chunk.logprobs or ())
        return opening + self._event(job, index, chunk.text, **more)

    def of_end(self, job: int, end: JobEnd) -> bytes:
        """Return the events that tell how the choices of a job ended."""
        reasons = [(each.finish_reason, each.stop_reason) for each in end.choices]
        if not reasons:
            reasons = [(end.finish_reason, end.stop_reason)]
        told = b""
        for number, (finish, stop) in enumerate(reasons):
            index = job * self.style.num_choices + number
            state = self._state(index)
            told += b"" if state.has_begun else self._open(job, index, state)
            told += self._event(job, index, "", finish_reason=finish, stop_reason=stop)
        return told

    def _state(self, index: int) -> _ChoiceState:
        state = self._choices.get(index)
        if state is None:
            event = self.envelope.text_event(
                b'{"index":%d,"text":' % index,
                b',"logprobs":null,"finish_reason":null,"stop_reason":null}',
            )
            style = self.style
            tokens = None
            if style.has_logprobs and style.names is not None:
                job = index // style.num_choices
                tokens = CompletionTokens(style.names, len(style.echo(job)))
            state = self._choices[index] = _ChoiceState(event, tokens)
        return state

    def _open(self, job: int, index: int, state: _ChoiceState) -> bytes:
        state.has_begun = True
        more: dict[str, Any] = {}
        if self.style.has_ids:
            more["prompt_token_ids"] = list(self.style.prompt_ids[job])
        echo = self.style.echo(job)
        return self._event(job, index, echo, **more) if echo or more else b""

    def _event(self, job: int, index: int, text: str, **more: Any) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            **more,
        }
        usage = {}
        if self.style.tells_usage:
            num_prompt = len(self.style.prompt_ids[job])
            usage["usage"] = usage_fields(num_prompt, self._state(index).num_tokens)
        return b"data: %b\n\n" % orjson.dumps(self.envelope.around([choice], **usage))


def result_events(style: CompletionStyle, results: Sequence[Result], envelope: Envelope) -> bytes:
    """Return one event per choice, for a stream of what is known at the end only."""
    return b"".join(
        b"data: %b\n\n" % orjson.dumps(envelope.around([choice]))
        for choice in completion_choices(results, style)
    )
