"""What probes and scrapers ask for."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tidemill._version import __version__
from tidemill.gateway.metrics import CONTENT_TYPE
from tidemill.gateway.openai_models.health import Load, Version
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import BrokerError

#: Probes give up after some seconds themselves, and then do not know why.
_PATIENCE_SECONDS = 2.0

router = APIRouter(tags=["health"])

_PROBED: dict[int | str, dict[str, Any]] = {
    200: {"description": "Send requests here"},
    503: {"description": "Do not"},
}
_MEASURES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text format",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


# Each method by itself: operations of one route would share an id in the document.
@router.get("/health", responses=_PROBED, response_class=Response)
@router.head("/health", responses=_PROBED, response_class=Response)
@router.get("/ping", responses=_PROBED, response_class=Response)
@router.post("/ping", responses=_PROBED, response_class=Response)
async def health(request: Request) -> Response:
    """Tell whether requests can be accepted: the queue answers, and the gateway is not stopping."""
    state: GatewayState = request.app.state.gateway
    if state.is_draining:
        return Response(status_code=503)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await state.producer("default").models()
    except (BrokerError, TimeoutError):
        return Response(status_code=503)
    return Response(status_code=200)


@router.get("/version")
async def version() -> Version:
    """Tell the version of the gateway."""
    return Version(version=__version__)


@router.get("/load")
async def load(request: Request) -> Load:
    """Tell how many requests are being answered, but for this one."""
    state: GatewayState = request.app.state.gateway
    return Load(server_load=state.metrics.num_open - 1)


@router.get("/metrics", responses=_MEASURES, response_class=Response)
@router.head("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Tell Prometheus everything."""
    state: GatewayState = request.app.state.gateway
    return Response(state.metrics.text(), media_type=CONTENT_TYPE)
