"""``/v1/messages``, for clients of Anthropic's API."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.call import CurrentCall
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.messaging import answer_message, count_tokens
from tidemill.gateway.openai_models.messages import (
    CountedRequest,
    Message,
    MessagesRequest,
    TokenCount,
)
from tidemill.gateway.openai_models.streaming import EVENTS

router = APIRouter(tags=["messages"], route_class=JsonRoute)

_STREAM_OR_BODY: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole message or, with `stream`, server-sent events from"
        " `message_start` to `message_stop`",
        "content": EVENTS,
    }
}


@router.post("/v1/messages", response_model=Message, responses=_STREAM_OR_BODY)
async def create_message(call: CurrentCall, body: MessagesRequest) -> Response:
    """Continue a conversation."""
    return await answer_message(call, body)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(call: CurrentCall, body: CountedRequest) -> TokenCount:
    """Count the tokens of a conversation."""
    return TokenCount(input_tokens=await count_tokens(call, body))
