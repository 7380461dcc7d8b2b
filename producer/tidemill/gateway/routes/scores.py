"""``/v1/score`` and ``/v1/rerank``, also under the other paths that clients of vLLM's know."""

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.call import CurrentCall
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.kind_plans import answer_kind
from tidemill.gateway.openai_models.scores import (
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from tidemill.gateway.scoring import plan_ranking, plan_scores

router = APIRouter(tags=["scores"], route_class=JsonRoute)


@router.post("/score", response_model=ScoreList)
@router.post("/v1/score", response_model=ScoreList)
async def create_scores(call: CurrentCall, body: ScoreRequest) -> Response:
    """Say how well the second text of each pair answers the first."""
    return await answer_kind(call, await plan_scores(call, body))


@router.post("/rerank", response_model=Ranking, response_model_exclude_none=True)
@router.post("/v1/rerank", response_model=Ranking, response_model_exclude_none=True)
@router.post("/v2/rerank", response_model=Ranking, response_model_exclude_none=True)
async def create_ranking(call: CurrentCall, body: RerankRequest) -> Response:
    """Put documents in the order of how well they answer a query."""
    return await answer_kind(call, await plan_ranking(call, body))
