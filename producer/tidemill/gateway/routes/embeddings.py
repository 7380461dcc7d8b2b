"""``/v1/embeddings``."""

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.call import CurrentCall
from tidemill.gateway.embedding import plan_embeddings
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.kind_plans import answer_kind
from tidemill.gateway.openai_models.embeddings import EmbeddingList, EmbeddingRequest

router = APIRouter(tags=["embeddings"], route_class=JsonRoute)


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def create_embeddings(call: CurrentCall, body: EmbeddingRequest) -> Response:
    """Return a vector for each input."""
    return await answer_kind(call, await plan_embeddings(call.producer, body, call.idempotency_key))
