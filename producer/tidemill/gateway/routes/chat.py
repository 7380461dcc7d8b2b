"""``/v1/chat/completions``."""

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.answering import answer
from tidemill.gateway.call import CurrentCall
from tidemill.gateway.chatting import plan_chat
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.openai_models.chat import ChatCompletion, ChatRequest
from tidemill.gateway.openai_models.streaming import STREAM_OR_BODY

router = APIRouter(tags=["chat"], route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM_OR_BODY)
async def create_chat_completion(call: CurrentCall, body: ChatRequest) -> Response:
    """Continue a conversation."""
    return await answer(call, await plan_chat(call, body))
