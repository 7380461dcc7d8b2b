"""What a chat request asks of the queue."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tidemill._request import JobOptions, JobSpec
from tidemill._structured import take_structured
from tidemill.gateway.answering import Events, Plan
from tidemill.gateway.call import Call
from tidemill.gateway.checks import check_streaming, refuse
from tidemill.gateway.jobs import renamed
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.options import answer_form, form_field, job_options
from tidemill.gateway.prompts import LONG_CHARS, check_size, cut
from tidemill.gateway.shaping.chat import (
    ChatEvents,
    ChatStyle,
    chat_choices,
    chat_prompt_fields,
)
from tidemill.gateway.shaping.envelope import Envelope
from tidemill.gateway.shaping.logprobs import TokenNames
from tidemill.openai.chat import ChatFormats, ChatJob, chat_job
from tidemill.openai.tools import CallMode
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.requests import Kind
from tidemill.protocol.structured import StructuredOutput
from tidemill.result import Result
from tidemill.service.job_inputs import check_kind
from tidemill.service.offload import beside_loop
from tidemill.service.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Tells results and streams as chats; ``more`` are further fields of the answer."""

    style: ChatStyle
    more: dict[str, Any]

    def body(self, results: Sequence[Result], envelope: Envelope) -> dict[str, Any]:
        """Return the whole answer."""
        [result] = results
        fields = {**chat_prompt_fields(result, self.style), **self.more}
        return envelope.around(chat_choices(result, self.style), **fields)

    def events(self, envelope: Envelope) -> Events:
        """Return the maker of a stream's events."""
        return ChatEvents(envelope, self.style, envelope.id.partition("-")[2])


async def plan_chat(call: Call, body: ChatRequest, *, goes_on: bool = False) -> Plan:
    """Return the job of a request; raises ``InvalidRequest`` naming the field that is wrong.

    ``goes_on`` tells that the conversation is longer than the body of the call.
    """
    _check(body)
    card = await call.producer.model(body.model)
    # Before it is asked for a chat template, which it does not have.
    check_kind(Kind.GENERATE, card)
    tokenizer = await call.producer.tokenizer(body.model)
    make = partial(make_chat_job, call, body, tokenizer, card)
    job = await beside_loop(make) if goes_on or is_long(call) else make()
    limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, limit_field)
    ids = cut(job.prompt_ids, body, card, max_tokens)
    options = _options(body, job, tokenizer, max_tokens)
    options["idempotency_key"] = call.idempotency_key
    return Plan(
        specs=[JobSpec(ids, **options)],
        shape=ChatShape(
            _style(call, body, job, ids, tokenizer),
            {} if body.metadata is None else {"metadata": body.metadata},
        ),
        card=card,
        model=body.model or card.name,
        id_prefix="chatcmpl",
        kind="chat.completion",
        event_kind="chat.completion.chunk",
        prompt_field="messages",
        limit_field=limit_field,
        streams=body.stream,
        stream_interval=body.stream_interval,
        includes_usage=body.includes_usage,
        form_field="tools" if job.choice.mode is CallMode.FORCED else form_field(body),
    )


def make_chat_job(call: Call, body: ChatRequest, tokenizer: Tokenizer, card: ModelCard) -> ChatJob:
    """Return prompt, constraint and parser of a request; raises ``InvalidRequest``."""
    settings = call.state.settings
    continues = body.continue_final_message
    adds_prompt = (
        not continues if body.add_generation_prompt is None else body.add_generation_prompt
    )
    is_cut = body.truncate_prompt_tokens is not None
    job = chat_job(
        tokenizer,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        structured=_form(body),
        formats=ChatFormats.of(
            tokenizer.chat_template,
            tools=settings.tool_call_parser,
            reasoning=settings.reasoning_parser,
        ),
        add_generation_prompt=adds_prompt,
        template_options=_template_options(body),
        check_prompt=lambda text: check_size("messages", text, tokenizer, card, is_cut=is_cut),
    )
    if continues:
        job = continued(job, body.messages, tokenizer)
    if body.add_special_tokens:
        job = replace(job, prompt_ids=tuple(tokenizer.encode(job.prompt)))
    return job


def _form(body: ChatRequest) -> StructuredOutput | None:
    def name_of(_: int, field: str) -> str:
        return form_field(body) if field.startswith("structured.") else field

    try:
        return take_structured({"structured": answer_form(body)})
    except InvalidRequest as error:
        raise renamed(error, 0, name_of) from None


def _check(body: ChatRequest) -> None:
    check_streaming(body)
    if body.functions is not None or body.function_call is not None:
        raise refuse("functions", "OpenAI has replaced them by tools", "Send tools.")
    if body.chat_template is not None:
        raise refuse(
            "chat_template", "templates are the model's own", "Put it into the model's directory."
        )
    if body.echo:
        raise refuse("echo", "answers hold what is new alone", "Put the last message before it.")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "it needs logprobs", "Set logprobs to true.")
    if body.continue_final_message and body.add_generation_prompt:
        raise refuse("continue_final_message", "it does not go with add_generation_prompt")


def _template_options(body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        options["documents"] = body.documents
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return options


def _options(
    body: ChatRequest, job: ChatJob, tokenizer: Tokenizer, max_tokens: int | None
) -> JobOptions:
    options = job_options(body)
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if job.structured is not None:
        options["structured"] = job.structured
    elif body.skip_special_tokens is None and _reads_special_tokens(job, tokenizer):
        options["skip_special_tokens"] = False
    return options


def _reads_special_tokens(job: ChatJob, tokenizer: Tokenizer) -> bool:
    """Whether calls or reasoning are marked by tokens that a text would normally not show."""
    markers: list[str] = []
    if job.formats.tools is not None and job.choice.tools:
        markers += job.formats.tools.readers
    if job.formats.reasoning is not None:
        markers += (job.formats.reasoning.open, job.formats.reasoning.close)
    ids = (tokenizer.raw.token_to_id(marker) for marker in markers)
    return any(token_id in tokenizer.all_special_ids for token_id in ids)


def _style(
    call: Call, body: ChatRequest, job: ChatJob, ids: Sequence[int], tokenizer: Tokenizer
) -> ChatStyle:
    names = None
    if body.logprobs or body.prompt_logprobs is not None:
        names = TokenNames(call.state.token_texts(tokenizer), body.return_tokens_as_token_ids)
    return ChatStyle(
        job=job,
        names=names,
        has_logprobs=body.logprobs,
        has_prompt_logprobs=body.prompt_logprobs is not None,
        has_ids=body.return_token_ids,
        has_reasoning=body.include_reasoning,
        tells_usage=body.tells_usage_always,
        prompt_ids=ids,
    )


def continued(job: ChatJob, messages: Any, tokenizer: Tokenizer) -> ChatJob:
    """Return the job whose prompt ends with the last message, so that the answer goes on there."""
    content = messages[-1].get("content")
    text = content.rstrip() if isinstance(content, str) else ""
    start = job.prompt.rfind(text)
    if not text or start < 0:
        raise refuse(
            "continue_final_message", "the last message has no text to go on from", "Give it some."
        )
    prompt = job.prompt[: start + len(text)]
    ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
    return replace(job, prompt=prompt, prompt_ids=ids)


def is_long(call: Call) -> bool:
    """Whether a body is so long that what is made of it would hold up the event loop."""
    length = call.request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) >= LONG_CHARS
