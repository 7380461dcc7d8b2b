"""Every route needs a scope; what was forgotten is closed."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import redis
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from tidemill._async_link import AsyncLink
from tidemill._link import Link
from tidemill.access.api_keys import ALL_SCOPES, KeyScope
from tidemill.access.key_store import KeyStore
from tidemill.gateway import stored_keys
from tidemill.gateway.app import ROUTERS, create_app
from tidemill.gateway.body_limit import BodyLimit
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.identity import MEASURING_PATHS, OPEN_PATHS, Authenticator, Identity
from tidemill.gateway.permissions import RULES
from tidemill.gateway.state import GatewayState
from tidemill.gateway.stored_keys import MAX_REMEMBERED, TRUST_SECONDS, USE_SECONDS, StoredKeys
from tidemill.protocol.errors import ConfigError, Unauthenticated
from tidemill.protocol.keys import ShardKeys

ROUTES = sorted(
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods or ()
)
NOTHING = Headers({})


class Scoped:
    """Everybody has these scopes."""

    def __init__(self, *scopes: KeyScope) -> None:
        self._scopes = frozenset(scopes)

    async def identify(self, token: str, headers: Headers) -> Identity:
        return Identity(scopes=self._scopes)


@asynccontextmanager
async def app_for(
    authenticator: Authenticator, *more: APIRouter, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application without a broker."""
    chosen = GatewaySettings(redis_url="unix:///nowhere.sock", broker_seconds=0.0, **settings)
    state = GatewayState(chosen, authenticator=authenticator)
    app = create_app(state)
    for router in more:
        app.include_router(router)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
    await state.close()


def test_every_route_has_a_rule_or_is_open() -> None:
    ruled = set(RULES)
    assert [route for route in ROUTES if route not in ruled and route[1] not in OPEN_PATHS] == []
    assert ruled - set(ROUTES) == set(), "rules of routes that are not there"
    # What is always open can do nothing: no rule would be heeded.
    assert {path for _, path in ruled} & OPEN_PATHS == MEASURING_PATHS


async def test_every_route_is_closed_to_a_key_that_allows_nothing() -> None:
    async with app_for(Scoped()) as client:
        for method, path in ROUTES:
            if path in OPEN_PATHS:
                continue
            answer = await client.request(method, path, json={})
            assert answer.status_code == 403, (method, path, answer.text)


@pytest.mark.parametrize("scope", sorted(KeyScope))
async def test_a_scope_opens_its_own_routes_alone(scope: KeyScope) -> None:
    async with app_for(Scoped(scope)) as client:
        for (method, path), needed in RULES.items():
            # Past the door there is no broker, and most fields are missing.
            if path not in OPEN_PATHS and needed != scope:
                assert (await client.request(method, path, json={})).status_code == 403


async def test_a_route_without_a_rule_is_for_admins() -> None:
    router = APIRouter()

    @router.get("/v1/forgotten")
    async def forgotten() -> str:
        return "x"

    async with app_for(Scoped(*(ALL_SCOPES - {KeyScope.ADMIN})), router) as client:
        assert (await client.get("/v1/forgotten")).status_code == 403
    async with app_for(Scoped(KeyScope.ADMIN), router) as client:
        assert (await client.get("/v1/forgotten")).status_code == 200


def test_without_a_pepper_no_gateway_asks_for_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_KEY_PEPPER_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no pepper"):
        GatewayState(GatewaySettings(require_keys=True))


async def test_measures_can_be_closed_and_probes_cannot() -> None:
    async with app_for(Scoped(), protect_metrics=True) as client:
        statuses = {path: (await client.get(path)).status_code for path in sorted(OPEN_PATHS)}
    assert {path for path, status in statuses.items() if status == 403} == MEASURING_PATHS
    assert statuses["/version"] == 200


class Home:
    """What the look-up needs of its gateway; ``chores`` are left to the test."""

    def __init__(self, url: str) -> None:
        self._link = AsyncLink(url, "00", 10)
        self.chores: list[Coroutine[Any, Any, None]] = []
        self.num_looks = 0

    def link(self, shard: str) -> AsyncLink:
        self.num_looks += 1
        return self._link

    def spawn(self, chore: Coroutine[Any, Any, None], name: str) -> None:
        self.chores.append(chore)

    async def close(self) -> None:
        for chore in self.chores:
            await chore
        await self._link.close()


class Clock:
    """Time that stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def looked_up(url: str) -> AsyncIterator[tuple[KeyStore, Home, StoredKeys, Clock]]:
    home, clock, link = Home(url), Clock(), Link(url, "00", 10)
    yield KeyStore(link, ShardKeys(), b"pepper"), home, _stored(home, clock), clock
    await home.close()
    link.close()


def _stored(home: Home, clock: Clock) -> StoredKeys:
    return StoredKeys(home, b"pepper", ["00"], clock=clock)


async def test_a_key_is_looked_up_once_in_a_while_and_its_use_is_noted_seldom(
    redis_url: str, redis_client: redis.Redis
) -> None:
    async with looked_up(redis_url) as (store, home, keys, clock):
        token, key = store.create("acme", scopes=frozenset({KeyScope.READ}))
        for _ in range(3):
            identity = await keys.identify(token.text, NOTHING)
            assert identity == Identity("acme", frozenset({KeyScope.READ}), key.key_id)
        assert home.num_looks == 1 and len(home.chores) == 1
        store.revoke(key.key_id)
        clock.now += TRUST_SECONDS * 0.99
        await keys.identify(token.text, NOTHING)
        clock.now += TRUST_SECONDS * 0.02
        with pytest.raises(Unauthenticated):
            await keys.identify(token.text, NOTHING)
        other, _ = store.create("acme")
        for _ in range(2):
            await keys.identify(other.text, NOTHING)
            clock.now += USE_SECONDS
        assert len(home.chores) == 3
    # The use of the one that was revoked meanwhile is not kept.
    assert [stored.key_id for stored in _all(redis_url)] == [other.key_id]
    assert redis_client.hkeys(ShardKeys().api_key_uses) == [other.key_id.encode()]


def _all(url: str) -> list[Any]:
    link = Link(url, "00", 10)
    try:
        return list(KeyStore(link, ShardKeys()).all())
    finally:
        link.close()


async def test_a_key_is_not_trusted_beyond_its_expiry(redis_url: str) -> None:
    async with looked_up(redis_url) as (store, _, keys, clock):
        token, _ = store.create("acme", expires_seconds=1.0)
        await keys.identify(token.text, NOTHING)
        clock.now += 1.0
        # Looked up again, it is valid for what is left by the server's clock.
        assert (await keys.identify(token.text, NOTHING)).tenant == "acme"
        gone, _ = store.create("acme", expires_seconds=0.0)
        with pytest.raises(Unauthenticated, match="expired"):
            await keys.identify(gone.text, NOTHING)


async def test_a_miss_compares_as_a_wrong_secret_does(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append(len(kept))
        return hmac.compare_digest(given, kept)

    class Compare:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(stored_keys, "hmac", Compare)
    async with looked_up(redis_url) as (store, home, keys, _):
        token, key = store.create("acme")
        told = []
        for key_id in (key.key_id, "00" + "0" * 26):
            with pytest.raises(Unauthenticated) as refused:
                await keys.identify(f"tmk_{key_id}_{'A' * 43}", NOTHING)
            told.append(refused.value.one_line())
        # What is no key at all costs no look, nor does a shard that there is not.
        before = home.num_looks
        for text in ("", "x", token.text + "x", f"tmk_01{'0' * 26}_{'A' * 43}"):
            with pytest.raises(Unauthenticated):
                await keys.identify(text, NOTHING)
        assert home.num_looks == before
    assert compared == [32, 32] and told[0] == told[1]


async def test_keys_made_with_another_pepper_are_none(redis_url: str) -> None:
    async with looked_up(redis_url) as (_, _, keys, _):
        link = Link(redis_url, "00", 10)
        token, _ = KeyStore(link, ShardKeys(), b"another").create("acme")
        link.close()
        with pytest.raises(Unauthenticated):
            await keys.identify(token.text, NOTHING)


async def test_what_is_remembered_is_bounded_and_is_no_secret(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_keys, "MAX_REMEMBERED", 2)
    assert MAX_REMEMBERED > 2
    async with looked_up(redis_url) as (store, home, keys, _):
        tokens = [store.create("acme")[0] for _ in range(3)]
        for token in tokens:
            await keys.identify(token.text, NOTHING)
        assert home.num_looks == 3
        await keys.identify(tokens[2].text, NOTHING)
        assert home.num_looks == 3
        await keys.identify(tokens[0].text, NOTHING)
        assert home.num_looks == 4


async def test_a_body_that_trickles_is_refused_in_the_end() -> None:
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            told.append("read")

    limited = BodyLimit(app, num_bytes=10**6, bounds={}, silence_seconds=0.05)

    async def one_byte() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def nowhere(message: Any) -> None:
        told.append(message)

    scope = {"type": "http", "path": "/", "headers": []}
    with pytest.raises(HTTPException) as refused:
        await limited(scope, one_byte, nowhere)
    assert refused.value.status_code == 408 and 0 < told.count("read") < 10
