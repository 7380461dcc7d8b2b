"""``/v1/completions``."""

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.answering import answer
from tidemill.gateway.call import CurrentCall
from tidemill.gateway.completing import plan_completion
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.openai_models.completions import Completion, CompletionRequest
from tidemill.gateway.openai_models.streaming import STREAM_OR_BODY

router = APIRouter(tags=["completions"], route_class=JsonRoute)


@router.post("/v1/completions", response_model=Completion, responses=STREAM_OR_BODY)
async def create_completion(call: CurrentCall, body: CompletionRequest) -> Response:
    """Continue prompts, which may be texts or token ids."""
    return await answer(call, await plan_completion(call, body))
