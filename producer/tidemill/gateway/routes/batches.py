"""``/v1/batches``: many requests in one file, answered whenever there is room."""

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.gateway.answering import json_response
from tidemill.gateway.call import CurrentCall
from tidemill.gateway.json_bodies import JsonRoute
from tidemill.gateway.openai_models.batches import BatchList, BatchObject, BatchRequest

router = APIRouter(tags=["batches"], route_class=JsonRoute)


@router.post("/v1/batches", response_model=BatchObject)
async def create_batch(call: CurrentCall, body: BatchRequest) -> Response:
    """Accept a batch."""
    call.check_callback(body.callback_url)
    batch = await call.state.batches(call.identity.tenant).create_batch(
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_expires_after=body.output_expires_after,
        callback_url=body.callback_url,
        idempotency_key=call.idempotency_key,
    )
    return json_response(batch.plain())


@router.get("/v1/batches", response_model=BatchList)
async def list_batches(
    call: CurrentCall, after: str | None = None, limit: str | None = None
) -> Response:
    """List batches, the newest first."""
    page = await call.state.batches(call.identity.tenant).batches(after=after, limit=limit)
    return json_response(page.plain())


@router.get("/v1/batches/{batch_id}", response_model=BatchObject)
async def get_batch(call: CurrentCall, batch_id: str) -> Response:
    """Describe a batch and how far it is."""
    batch = await call.state.batches(call.identity.tenant).batch(batch_id)
    return json_response(batch.plain())


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject)
async def cancel_batch(call: CurrentCall, batch_id: str) -> Response:
    """End a batch early; what was answered is kept."""
    batch = await call.state.batches(call.identity.tenant).cancel_batch(batch_id)
    return json_response(batch.plain())
