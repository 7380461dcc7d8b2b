"""Who calls: the tenant and what its key allows, found before any route runs."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill._request import check_tenant
from tidemill.access.api_keys import ALL_SCOPES, KeyScope
from tidemill.gateway.errors import error_response
from tidemill.protocol.calls.access import NO_LIMITS, KeyLimits
from tidemill.protocol.errors import Forbidden, TidemillError, Unauthenticated

TENANT_HEADER = "x-tidemill-tenant"
DEFAULT_TENANT = "default"
#: Paths that probes and scrapers read without a key; none tells of jobs or tenants.
OPEN_PATHS = frozenset(
    {"/health", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/docs"}
)
#: Those of them that tell how much is done here.
MEASURING_PATHS = frozenset({"/load", "/metrics"})


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: its tenant, what it may do, and the id of its key, empty without a key store.

    ``limits`` are what the key may submit in a minute.
    """

    tenant: str = DEFAULT_TENANT
    scopes: frozenset[KeyScope] = field(default=ALL_SCOPES)
    key_id: str = ""
    limits: KeyLimits = NO_LIMITS

    def require(self, scope: str) -> None:
        """Raise ``Forbidden`` unless the key has this scope."""
        if scope not in self.scopes:
            raise Forbidden(f"this API key lacks the scope {scope}", fix="Use a key that has it.")


class Authenticator(Protocol):
    """Finds out who calls."""

    async def identify(self, token: str, headers: Headers) -> Identity:
        """Return the caller of a request whose bearer token is ``token``, "" for none.

        Raises ``Unauthenticated``, or ``BrokerUnavailable`` if keys cannot be looked up.
        """


class AnyCaller:
    """No keys: everybody may call, as the tenant that a header names."""

    async def identify(self, token: str, headers: Headers) -> Identity:
        """Return the tenant of the header ``X-Tidemill-Tenant``; any token will do."""
        return Identity(check_tenant(headers.get(TENANT_HEADER, DEFAULT_TENANT)))


class FixedKeys:
    """A few keys from the command line, all of them the default tenant's."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def identify(self, token: str, headers: Headers) -> Identity:
        """Return the default tenant if the token is one of the keys."""
        given = sha256(token.encode("utf-8", "surrogateescape")).digest()
        # All of them, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise wrong_key(token)
        return Identity()


def wrong_key(token: str) -> Unauthenticated:
    """Return the error for a token that is no key, without repeating it."""
    if not token:
        return Unauthenticated(
            "no API key was given", fix="Send it in the header Authorization: Bearer KEY."
        )
    return Unauthenticated("the API key is not valid", fix="Check it, or ask for another.")


class Authentication:
    """ASGI middleware: puts an ``Identity`` into the request's state, or answers 401.

    Of ``open_paths`` nobody is asked who calls.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            identity = await self._authenticator.identify(bearer_token(headers), headers)
        except TidemillError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["identity"] = identity
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in self._open_paths


def bearer_token(headers: Headers) -> str:
    """Return the token of the header ``Authorization``, or of Anthropic's ``x-api-key``."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")
