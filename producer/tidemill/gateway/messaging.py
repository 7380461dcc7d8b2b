"""What a request for a message asks of the queue, and how the answer is told."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response

from tidemill.gateway.answering import Plan, json_response, note_first_token, note_usage
from tidemill.gateway.call import Call
from tidemill.gateway.chatting import ChatShape, is_long, plan_chat
from tidemill.gateway.disconnects import ClientGone, while_connected
from tidemill.gateway.errors import CLIENT_GONE_STATUS, api_error
from tidemill.gateway.jobs import Piece, RequestJobs, renamed, submit
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.openai_models.messages import CountedRequest, MessagesRequest
from tidemill.gateway.shaping.chat import ChatStyle
from tidemill.gateway.shaping.messages import MessageEvents, error_event, message
from tidemill.gateway.sse import EventStream
from tidemill.openai.anthropic import chat_messages, chat_tool_choice, chat_tools, is_begun
from tidemill.protocol.errors import InvalidRequest
from tidemill.service.offload import beside_loop

_log = logging.getLogger(__name__)

#: Fields that chats have under the same name.
_SAME = (
    *("model", "temperature", "top_p", "top_k", "seed"),
    *("priority", "deadline", "cache_salt", "callback_url"),
)


async def answer_message(call: Call, body: MessagesRequest) -> Response:
    """Continue a conversation and tell it as a message.

    Raises what submitting and waiting for jobs raise.
    """
    plan = await plan_chat(call, await _translated(call, body))
    try:
        jobs = await submit(call, plan.specs)
    except InvalidRequest as error:
        raise renamed(error, 0, _name_of) from None
    style = _style(plan)
    if body.stream:
        events = MessageEvents(jobs.ids[0], plan.model, len(style.prompt_ids), style.job.parser())
        return EventStream(
            _stream(call, jobs, events), owner=jobs, last=b"", error_event=error_event
        )
    try:
        with jobs:
            async with while_connected(call.request.receive):
                [result] = await jobs.results()
    except ClientGone:
        return Response(status_code=CLIENT_GONE_STATUS)
    note_usage(call, [result.usage])
    return json_response(message(result, style.job.parser(), plan.model))


async def count_tokens(call: Call, body: CountedRequest) -> int:
    """Return the length of a conversation's prompt; raises ``InvalidRequest``."""
    plan = await plan_chat(call, await _translated(call, body))
    return len(_style(plan).prompt_ids)


def as_chat(body: CountedRequest) -> ChatRequest:
    """Return the same request as OpenAI's clients would send it; raises ``InvalidRequest``."""
    messages = chat_messages(body.system, body.messages)
    choice, is_parallel = chat_tool_choice(body.tool_choice)
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": chat_tools(body.tools),
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "continue_final_message": is_begun(messages),
        "model": body.model,
    }
    if body.thinking is not None:
        wants = body.thinking.get("type") != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": wants}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in _SAME}
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream}
        fields["stop"] = body.stop_sequences or None
    return ChatRequest.model_validate(fields)


async def _translated(call: Call, body: CountedRequest) -> ChatRequest:
    return await beside_loop(partial(as_chat, body)) if is_long(call) else as_chat(body)


def _name_of(_: int, field: str) -> str:
    name = field.removeprefix("params.").partition(".")[0]
    return {"prompt_ids": "messages", "stop": "stop_sequences", "structured": "tools"}.get(
        name, field
    )


def _style(plan: Plan) -> ChatStyle:
    assert isinstance(plan.shape, ChatShape), "the plan is of a chat"
    return plan.shape.style


async def _stream(call: Call, jobs: RequestJobs, events: MessageEvents) -> AsyncGenerator[bytes]:
    yield events.start()
    is_first = True
    try:
        async with aclosing(jobs.pieces()) as batches:
            async for pieces in batches:
                if is_first:
                    is_first = False
                    note_first_token(call)
                if data := b"".join(_told(call, events, piece) for piece in pieces):
                    yield data
    except Exception as error:
        # The status has been told, and clients of this API look for an event of their own.
        told = api_error(error)
        if told.code == "internal_error":
            _log.exception("a stream failed")
        yield error_event(told)


def _told(call: Call, events: MessageEvents, piece: Piece) -> bytes:
    if piece.end is not None:
        note_usage(call, [piece.end.usage])
        return events.of_end(piece.end)
    return b"" if piece.chunk is None else events.of_text(piece.chunk.text)
