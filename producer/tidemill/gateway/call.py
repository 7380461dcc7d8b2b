"""One HTTP request as its route sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from tidemill._request import JobSpec
from tidemill.async_client import AsyncProducer
from tidemill.async_job import AsyncJob
from tidemill.gateway.checks import check_callback
from tidemill.gateway.identity import Identity
from tidemill.gateway.key_limits import KeyAccount
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import TidemillError


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks, under which id, and what serves it."""

    request: Request
    state: GatewayState
    identity: Identity
    request_id: str
    account: KeyAccount

    @property
    def producer(self) -> AsyncProducer:
        """The client for the caller's jobs."""
        return self.state.producer(self.identity.tenant)

    async def submit_many(self, specs: Sequence[JobSpec]) -> list[AsyncJob | TidemillError]:
        """Queue jobs; an error takes the place of a refused one.

        Raises ``RateLimited`` if the caller's key has not enough tokens for all of them, and
        ``InvalidRequest`` for a callback that could never be delivered.
        """
        for spec in specs:
            self.check_callback(spec.callback_url)
        return await self.producer._submit_many(specs, self.account.take_jobs)

    def check_callback(self, url: str | None) -> None:
        """Raise ``InvalidRequest`` if no webhook may go to ``url``."""
        check_callback(url, allow_private=self.state.settings.allow_private_webhooks)

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
    gateway = request.app.state.gateway
    account = KeyAccount(gateway, identity, request)
    return Call(request, gateway, identity, state.request_id, account)


CurrentCall = Annotated[Call, Depends(current_call)]
