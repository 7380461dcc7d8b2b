"""What a request for completions asks of the queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill._request import JobOptions, JobSpec
from tidemill.gateway.answering import Events, Plan
from tidemill.gateway.call import Call
from tidemill.gateway.checks import check_streaming, refuse
from tidemill.gateway.openai_models.completions import CompletionRequest
from tidemill.gateway.options import answer_form, form_field, job_options, key_of_job
from tidemill.gateway.prompts import LONG_CHARS, TextOrIds, prompts_of, token_ids
from tidemill.gateway.shaping.completions import (
    CompletionEvents,
    CompletionStyle,
    completion_choices,
    result_events,
)
from tidemill.gateway.shaping.envelope import Envelope
from tidemill.gateway.shaping.logprobs import TokenNames
from tidemill.protocol.messages import ModelCard
from tidemill.result import Result
from tidemill.service.offload import beside_loop
from tidemill.service.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Tells results and streams as completions."""

    style: CompletionStyle

    def body(self, results: Sequence[Result], envelope: Envelope) -> dict[str, Any]:
        """Return the whole answer."""
        return envelope.around(completion_choices(results, self.style))

    def events(self, envelope: Envelope) -> Events:
        """Return the maker of a stream's events."""
        return CompletionEvents(envelope, self.style)


async def plan_completion(call: Call, body: CompletionRequest) -> Plan:
    """Return the jobs of a request; raises ``InvalidRequest`` naming the field that is wrong."""
    _check(body)
    card = await call.producer.model(body.model)
    prompts = prompts_of(body.prompt)
    tokenizer = None
    if _needs_tokenizer(body, prompts):
        tokenizer = await call.producer.tokenizer(body.model)
    return await _plan(call, body, card, prompts, tokenizer)


async def _plan(
    call: Call,
    body: CompletionRequest,
    card: ModelCard,
    prompts: Sequence[TextOrIds],
    tokenizer: Tokenizer | None,
) -> Plan:
    ids: Sequence[tuple[int, ...]] = ()
    if tokenizer is not None and _needs_ids(body):
        ids = await token_ids(prompts, tokenizer, body, card, max_tokens=body.max_tokens)
        prompts = ids
    texts = await _texts(prompts, tokenizer) if body.echo else ()
    style = _style(call, body, texts, ids, tokenizer)
    return Plan(
        specs=_specs(call, body, prompts),
        shape=CompletionShape(style),
        card=card,
        model=body.model or card.name,
        id_prefix="cmpl",
        kind="text_completion",
        event_kind="text_completion",
        prompt_field="prompt",
        streams=body.stream,
        stream_interval=body.stream_interval,
        late_events=partial(result_events, style) if _is_late(body) else None,
        includes_usage=body.includes_usage,
        form_field=form_field(body),
    )


def _specs(call: Call, body: CompletionRequest, prompts: Sequence[TextOrIds]) -> list[JobSpec]:
    options, specs = _options(body), []
    for index, prompt in enumerate(prompts):
        options["idempotency_key"] = key_of_job(call.idempotency_key, index, call.identity_of_body)
        specs.append(JobSpec(prompt, **options))
    return specs


def _is_late(body: CompletionRequest) -> bool:
    """Whether a stream can begin only at the end: a prompt's logprobs come with the result."""
    return body.echo and body.logprobs is not None


def _check(body: CompletionRequest) -> None:
    check_streaming(body)
    if body.suffix:
        raise refuse("suffix", "no model here fills in text before a suffix", "Leave it out.")
    if body.max_tokens < 0 or (body.max_tokens == 0 and not body.echo):
        raise refuse("max_tokens", "it must be at least 1, or 0 with echo", "")


def _needs_ids(body: CompletionRequest) -> bool:
    return (
        body.add_special_tokens is False
        or body.truncate_prompt_tokens is not None
        or body.return_token_ids
        or body.tells_usage_always
    )


def _needs_tokenizer(body: CompletionRequest, prompts: Sequence[TextOrIds]) -> bool:
    has_ids = any(not isinstance(prompt, str) for prompt in prompts)
    wants_names = body.logprobs is not None or body.prompt_logprobs is not None
    return wants_names or _needs_ids(body) or (body.echo and has_ids)


def _options(body: CompletionRequest) -> JobOptions:
    options = job_options(body)
    options["max_tokens"] = max(1, body.max_tokens)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        if body.echo:
            options["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    form = answer_form(body)
    if form is not None:
        options["structured"] = form
    return options


def _style(
    call: Call,
    body: CompletionRequest,
    texts: Sequence[str],
    ids: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer | None,
) -> CompletionStyle:
    names = None
    if tokenizer is not None:
        names = TokenNames(call.state.token_texts(tokenizer), body.return_tokens_as_token_ids)
    return CompletionStyle(
        num_choices=body.n,
        names=names,
        has_logprobs=body.logprobs is not None,
        has_prompt_logprobs=body.prompt_logprobs is not None,
        has_ids=body.return_token_ids,
        has_echo=body.echo,
        tells_output=body.max_tokens > 0,
        tells_usage=body.tells_usage_always,
        texts=texts,
        prompt_ids=ids,
    )


async def _texts(prompts: Sequence[TextOrIds], tokenizer: Tokenizer | None) -> list[str]:
    def decode() -> list[str]:
        return [_text(prompt, tokenizer) for prompt in prompts]

    is_long = sum(map(len, prompts)) >= LONG_CHARS
    return await beside_loop(decode) if is_long else decode()


def _text(prompt: TextOrIds, tokenizer: Tokenizer | None) -> str:
    if isinstance(prompt, str):
        return prompt
    assert tokenizer is not None, "token ids are echoed with a tokenizer"
    return tokenizer.decode(prompt, skip_special_tokens=False)
