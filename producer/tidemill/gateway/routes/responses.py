"""``/v1/responses``: conversations that are kept, and can be left and come back to."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from tidemill.batches.terms import checked_limit
from tidemill.gateway.answering import json_response
from tidemill.gateway.call import CurrentCall
from tidemill.gateway.checks import refuse
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.openai_models.responses import (
    STREAM_OR_RESPONSE,
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ResponseObject,
    ResponseRequest,
)
from tidemill.gateway.responding import (
    cancel_response,
    count_tokens,
    create_response,
    delete_response,
    found,
    replay_response,
    retrieve_response,
)
from tidemill.gateway.shaping.responses import with_ids

router = APIRouter(tags=["responses"], route_class=JsonRoute)

_DEFAULT_ITEMS, _MAX_ITEMS = 20, 100


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAM_OR_RESPONSE)
async def create(call: CurrentCall, body: ResponseRequest) -> Response:
    """Continue a conversation."""
    return await create_response(call, body)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(call: CurrentCall, body: ResponseRequest) -> InputTokenCount:
    """Count the tokens that a response to this would read; nothing is queued."""
    return InputTokenCount(input_tokens=await count_tokens(call, body))


@router.get(
    "/v1/responses/{response_id}", response_model=ResponseObject, responses=STREAM_OR_RESPONSE
)
async def retrieve(
    call: CurrentCall,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Tell a response again; with ``stream`` its events, behind the number ``starting_after``."""
    if stream:
        after = -1 if starting_after is None else starting_after
        return await replay_response(call, response_id, after)
    if starting_after is not None:
        raise refuse("starting_after", "it is of streams alone", "Set stream, or leave it out.")
    return await retrieve_response(call, response_id)


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel(call: CurrentCall, response_id: str) -> Response:
    """End a response now; what it produced is kept."""
    return await cancel_response(call, response_id)


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete(call: CurrentCall, response_id: str) -> Response:
    """Forget a response."""
    return await delete_response(call, response_id)


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    call: CurrentCall,
    response_id: str,
    after: str | None = None,
    limit: str | None = None,
    order: str = "desc",
) -> Response:
    """List all that the model read, what came before in the conversation too."""
    if order not in ("asc", "desc"):
        raise refuse("order", "it is neither asc nor desc")
    most = checked_limit(limit, _DEFAULT_ITEMS, _MAX_ITEMS)
    job_id, record, _ = await found(call, response_id)
    items = with_ids(record.items, job_id)
    return json_response(_page(items if order == "asc" else items[::-1], after, most))


def _page(items: Sequence[Mapping[str, Any]], after: str | None, most: int) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise refuse("after", f"{after[:80]!r} is none of the items")
    start = 0 if after is None else ids.index(after) + 1
    data = items[start : start + most]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + most < len(items),
    }
