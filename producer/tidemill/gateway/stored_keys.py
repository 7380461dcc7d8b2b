"""Callers with keys of ``tidemill keys``, looked up in Redis and remembered for seconds."""

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers

from tidemill._async_link import AsyncLink
from tidemill.access.api_keys import ApiKey, Token, parse_token
from tidemill.access.key_store import find_key
from tidemill.gateway.identity import Authenticator, Identity, wrong_key
from tidemill.protocol.calls.access import Charged, charge_key, use_key
from tidemill.protocol.errors import Unauthenticated
from tidemill.protocol.keys import ShardKeys

#: How long a key that was found is trusted, and so how long a revoked one may still be used.
TRUST_SECONDS = 2.0
MAX_REMEMBERED = 10_000
#: A use is noted once in so long by each gateway.
USE_SECONDS = 60.0

#: Compared with where there is no key, so that a miss takes as long as a wrong secret.
_NOBODY = bytes(32)


class Home(Protocol):
    """What the look-up needs of its gateway."""

    def link(self, shard: str) -> AsyncLink:
        """Return the connection to a shard."""

    def spawn(self, chore: Coroutine[Any, Any, None], name: str) -> None:
        """Run something beside the requests."""


@dataclass(slots=True)
class _Remembered:
    key: ApiKey
    until: float


class StoredKeys:
    """Looks keys up; ``others`` are asked about tokens that do not look like stored keys."""

    def __init__(
        self,
        home: Home,
        pepper: bytes,
        shards: Collection[str],
        *,
        others: Authenticator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._pepper = pepper
        self._shards = frozenset(shards)
        self._others = others
        self._clock = clock
        #: By digest, never by what callers send.
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._noted: OrderedDict[str, float] = OrderedDict()

    async def identify(self, token: str, headers: Headers) -> Identity:
        """Return the tenant and the scopes of the key."""
        parsed = parse_token(token)
        if parsed is None and self._others is not None:
            return await self._others.identify(token, headers)
        if parsed is None or parsed.shard not in self._shards:
            raise wrong_key(token)
        key = await self._find(parsed)
        self._note(key)
        return Identity(key.tenant, frozenset(key.scopes), key.key_id, key.limits)

    async def charge(self, identity: Identity, *, requests: int = 0, tokens: int = 0) -> Charged:
        """Take from what the caller's key may submit, or give tokens < 0 back."""
        keys = ShardKeys(identity.key_id[:2])
        call = charge_key(
            keys, key_id=identity.key_id, limits=identity.limits, requests=requests, tokens=tokens
        )
        return await self._home.link(keys.shard).call(call)

    async def _find(self, token: Token) -> ApiKey:
        digest = token.digest(self._pepper)
        known = self._remembered.get(digest)
        if known is not None and self._clock() < known.until:
            return known.key
        self._remembered.pop(digest, None)
        asked_at = self._clock()
        link = self._home.link(token.shard)
        key, now_ms = await link.read(find_key(ShardKeys(token.shard), token.key_id))
        is_same = hmac.compare_digest(digest, _NOBODY if key is None else key.digest)
        if key is None or not is_same:
            raise wrong_key(token.text)
        if key.is_expired(now_ms):
            raise Unauthenticated("the API key has expired", fix="Ask for another.")
        self._remember(digest, key, asked_at, now_ms)
        return key

    def _remember(self, digest: bytes, key: ApiKey, asked_at: float, now_ms: int) -> None:
        lasts = TRUST_SECONDS
        if key.expires_ms is not None:
            lasts = min(lasts, (key.expires_ms - now_ms) / 1000)
        self._remembered[digest] = _Remembered(key, asked_at + lasts)
        _bound(self._remembered)

    def _note(self, key: ApiKey) -> None:
        now = self._clock()
        if now < self._noted.get(key.key_id, now):
            return
        self._noted[key.key_id] = now + USE_SECONDS
        self._noted.move_to_end(key.key_id)
        _bound(self._noted)
        self._home.spawn(self._write_use(key.key_id), "noting the use of an API key")

    async def _write_use(self, key_id: str) -> None:
        keys = ShardKeys(key_id[:2])
        await self._home.link(keys.shard).call(use_key(keys, key_id=key_id))


def _bound(mapping: OrderedDict[Any, Any]) -> None:
    while len(mapping) > MAX_REMEMBERED:
        mapping.popitem(last=False)
