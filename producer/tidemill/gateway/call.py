"""One HTTP request as its route sees it."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from tidemill.async_client import AsyncProducer
from tidemill.gateway.identity import Identity
from tidemill.gateway.state import GatewayState


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks, under which id, and what serves it."""

    request: Request
    state: GatewayState
    identity: Identity
    request_id: str

    @property
    def producer(self) -> AsyncProducer:
        """The client for the caller's jobs."""
        return self.state.producer(self.identity.tenant)

    @property
    def idempotency_key(self) -> str | None:
        """What the caller sent as ``Idempotency-Key``, if anything."""
        return self.request.headers.get("idempotency-key")

    @property
    def began_at(self) -> float:
        """When the request arrived, of ``time.monotonic``."""
        began_at: float = self.request.state.began_at
        return began_at


async def current_call(request: Request) -> Call:
    """Return the call of a request; a dependency."""
    state = request.state
    identity = getattr(state, "identity", None) or Identity()
    return Call(request, request.app.state.gateway, identity, state.request_id)


CurrentCall = Annotated[Call, Depends(current_call)]
