"""One HTTP request as its route sees it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import orjson
from fastapi import Depends
from starlette.requests import Request

from tidemill._request import JobSpec
from tidemill.async_client import AsyncProducer
from tidemill.async_job import AsyncJob
from tidemill.gateway.checks import check_callback
from tidemill.gateway.identity import Identity
from tidemill.gateway.key_limits import KeyAccount
from tidemill.gateway.keyed_specs import KeyedSpec
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import TidemillError


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks, under which id, and what serves it.

    ``identity_of_body`` is what requests with the same idempotency key must have in common beside
    what their jobs are: all of a JSON body, also what only says how the answer is told.
    """

    request: Request
    state: GatewayState
    identity: Identity
    request_id: str
    account: KeyAccount
    identity_of_body: bytes = b""

    @property
    def producer(self) -> AsyncProducer:
        """The client for the caller's jobs."""
        return self.state.producer(self.identity.tenant)

    async def submit_many(self, specs: Sequence[JobSpec]) -> list[AsyncJob | TidemillError]:
        """Queue jobs; an error takes the place of a refused one.

        Raises ``RateLimited`` if the caller's key has not enough tokens for all of them, and
        ``InvalidRequest`` for a callback that could never be delivered.
        """
        for url in {spec.callback_url for spec in specs}:
            self.check_callback(url)
        if self.identity_of_body:
            specs = [KeyedSpec(spec, self.identity_of_body) for spec in specs]
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
    digest = await _identity_of_body(request) if "idempotency-key" in request.headers else b""
    return Call(request, gateway, identity, state.request_id, account, digest)


async def _identity_of_body(request: Request) -> bytes:
    """Return a digest of a JSON body, whatever the order of its fields; nothing of a form."""
    if getattr(request.scope["route"], "body_field", None) is None:
        return b""
    data = await request.body()
    with suppress(TypeError):
        data = orjson.dumps(await request.json(), option=orjson.OPT_SORT_KEYS)
    return sha256(data).digest()


CurrentCall = Annotated[Call, Depends(current_call)]
