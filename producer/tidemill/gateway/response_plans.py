"""What a request for a response asks of the queue, and what is kept of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill._follow import Chunk
from tidemill._request import JobOptions, JobSpec
from tidemill.gateway.answering import Plan
from tidemill.gateway.call import Call
from tidemill.gateway.chatting import ChatShape, is_long, plan_chat
from tidemill.gateway.checks import refuse
from tidemill.gateway.jobs import renamed
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.openai_models.responses import ResponseRequest
from tidemill.gateway.shaping.chat import ChatStyle
from tidemill.gateway.shaping.response_events import ResponseEvents
from tidemill.gateway.shaping.responses import ResponseHead
from tidemill.openai.response_items import (
    chat_messages,
    chat_tool_choice,
    chat_tools,
    response_format,
    without_oldest,
)
from tidemill.openai.stored_readings import plain_reading
from tidemill.protocol.errors import ContextExceeded, InvalidRequest
from tidemill.protocol.messages import JobEnd
from tidemill.responses.record import ResponseRecord
from tidemill.result import Result
from tidemill.service.offload import beside_loop

#: Fields that chats have under the same name.
_SAME = (
    *("model", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "logit_bias"),
    *("structured_outputs", "chat_template_kwargs", "metadata", "prompt_cache_key"),
    *("priority", "deadline", "cache_salt"),
)
#: Fields that the answer repeats as they were sent.
_REPEATED = (
    *("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "temperature", "top_p", "user", "background", "store"),
    *("parallel_tool_calls", "truncation"),
)
#: What the fields of a chat are called here.
_NAMES = {
    "prompt_ids": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "structured": "text.format",
}
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A job, and what makes a response of it; ``style`` is that of the chat it comes to."""

    spec: JobSpec
    style: ChatStyle
    record: ResponseRecord

    def events(self, job_id: str, record: ResponseRecord | None = None) -> ResponseEvents:
        """Return the maker of the job's events."""
        head = ResponseHead(job_id, (record or self.record).fields)
        names = self.style.names if self.style.has_logprobs else None
        return ResponseEvents(head, self.style.job.parser(), names)

    def body(self, result: Result) -> dict[str, Any]:
        """Return the response of a job that has ended."""
        events = self.events(result.job_id)
        ids = result.token_ids
        events.of_chunk(Chunk(0, len(ids), ids, result.text, "", result.logprobs))
        end = JobEnd(
            state=result.state,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            error=result.error,
            usage=result.usage,
        )
        events.of_end(end)
        assert events.body is not None, "the job has ended"
        return events.body


async def plan_response(
    call: Call,
    body: ResponseRequest,
    items: Sequence[Mapping[str, Any]],
    *,
    idempotency_key: str | None = None,
) -> ResponsePlan:
    """Return the job that goes on after ``items``; raises ``InvalidRequest`` naming the field."""
    _check(body)
    tools = chat_tools(body.tools)
    try:
        plan = await _fitting(call, body, items, tools)
        # Checked here so that what is wrong has the name that the request calls it.
        plan.specs[0].draft(call.identity.tenant)
    except InvalidRequest as error:
        raise renamed(error, 0, request_name) from None
    style = _style(plan)
    record = ResponseRecord(
        fields=_fields(body, plan, tools),
        items=items,
        reading=plain_reading(style.job) | {"logprobs": style.has_logprobs},
    )
    options: JobOptions = {"idempotency_key": idempotency_key}
    if body.callback_url is not None:
        options["callback_url"] = body.callback_url
    return ResponsePlan(plan.specs[0].with_options(options), style, record)


def request_name(_: int, field: str) -> str:
    """Return what a request calls the field of its job."""
    if field.startswith("response_format"):
        return field.replace("response_format", "text.format", 1).replace(".json_schema", "", 1)
    name = field.removeprefix("params.").partition(".")[0]
    return _NAMES.get(name, field)


async def _fitting(
    call: Call,
    body: ResponseRequest,
    items: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> Plan:
    """Return the plan for all items or, as ``truncation`` says, for as many as the model takes."""

    goes_on = body.previous_response_id is not None

    async def planned(num_dropped: int) -> Plan:
        kept = without_oldest(items, num_dropped) if num_dropped else items
        make = partial(_as_chat, body, kept, tools)
        chat = await beside_loop(make) if goes_on or is_long(call) else make()
        return await plan_chat(call, chat, goes_on=goes_on)

    async def fits(num_dropped: int) -> bool:
        try:
            plan = await planned(num_dropped)
        except ContextExceeded:
            return False
        num_tokens = len(_style(plan).prompt_ids) + (body.max_output_tokens or 1)
        return num_tokens <= plan.card.max_model_len

    least, most = 1, len(items) - 1
    if body.truncation != "auto" or most < 1 or await fits(0):
        return await planned(0)
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if await fits(middle) else (middle + 1, most)
    return await planned(least)


def _style(plan: Plan) -> ChatStyle:
    assert isinstance(plan.shape, ChatShape), "the plan is of a chat"
    return plan.shape.style


def _check(body: ResponseRequest) -> None:
    if body.conversation is not None:
        raise refuse("conversation", "there are none", "Use previous_response_id.")
    if body.prompt is not None:
        raise refuse("prompt", "there are no templates of prompts", "Send input and instructions.")
    if body.context_management is not None:
        raise refuse("context_management", "it is not supported", "Leave it out.")
    if body.background and not body.store:
        raise refuse("background", "nobody could find the response", "Set store to true.")


def _as_chat(
    body: ResponseRequest, items: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None
) -> ChatRequest:
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= {
        "messages": chat_messages(body.instructions, items),
        "tools": tools,
        "tool_choice": chat_tool_choice(body.tool_choice),
        "max_completion_tokens": body.max_output_tokens,
        "response_format": response_format(body.text),
        "stream": body.stream or body.background,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
    }
    if body.top_logprobs is not None or _LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return ChatRequest.model_validate(fields)


def _fields(
    body: ResponseRequest, plan: Plan, tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    reasoning = {"effort": None, "summary": None, **(body.reasoning or {})}
    empty = {"description": None, "parameters": None, "strict": None}
    return {
        **{name: getattr(body, name) for name in _REPEATED},
        "created_at": int(time.time()),
        "model": plan.model,
        "metadata": body.metadata or {},
        "reasoning": reasoning,
        "service_tier": "default",
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"type": "function", **empty, **tool["function"]} for tool in tools or ()],
        "top_logprobs": body.top_logprobs or 0,
    }
