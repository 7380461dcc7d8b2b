"""One attempt to deliver: take it, send it, note how it went."""

import asyncio
import functools
import json
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import cast

import h11
import redis.asyncio

from tidemill.protocol.calls import webhooks as calls
from tidemill.protocol.calls.webhooks import CALLBACK, Edited, Mark, Refusal, Taken
from tidemill.protocol.functions import run_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import crash_point
from tidemill.service.web_targets import Blocked, check_target
from tidemill_webhooks import metrics
from tidemill_webhooks.address_guard import Resolver, pin, resolve_by_system
from tidemill_webhooks.breaker import FAILURES_TO_OPEN
from tidemill_webhooks.endpoints import (
    CALLBACK_FIELD,
    Hooks,
    Secret,
    active_values,
    read_hooks,
    stored_secrets,
)
from tidemill_webhooks.http_post import post
from tidemill_webhooks.schedule import Reply, Verdict, judge
from tidemill_webhooks.settings import DeliverySettings
from tidemill_webhooks.signing import new_secret, signed_headers

_log = logging.getLogger(__name__)

MAX_ERROR_CHARS = 200


class Deliverer:
    """Makes attempts on one shard; holds nothing between them."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: ShardKeys,
        settings: DeliverySettings,
        *,
        resolve: Resolver = resolve_by_system,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._resolve = resolve
        self._tls = tls

    async def attempt(self, delivery_id: str) -> str:
        """Try a delivery once if it is due; returns its state, or why it was not tried."""
        crash_point("webhooks.before_take")
        taken = await self._take(delivery_id)
        if isinstance(taken, Refusal):
            metrics.POSTPONED.labels(taken).inc()
            return taken
        crash_point("webhooks.after_take")
        started = time.monotonic()
        reply = await self._send(taken)
        seconds = time.monotonic() - started
        crash_point("webhooks.before_mark")
        state = await self._mark(delivery_id, taken, reply, seconds)
        crash_point("webhooks.after_mark")
        return state

    async def _take(self, delivery_id: str) -> Taken | Refusal:
        tenant, circuit = await self._place(delivery_id)
        return await run_async(
            self._client,
            calls.take_delivery(
                self._keys,
                delivery_id=delivery_id,
                tenant=tenant,
                circuit=circuit,
                lease_ms=self._settings.lease_ms,
                max_in_flight=self._settings.max_in_flight,
                pause_ms=self._settings.pause_ms,
                failures_to_open=FAILURES_TO_OPEN,
            ),
        )

    async def _place(self, delivery_id: str) -> tuple[str, str]:
        # Neither ever changes.
        found = self._client.hmget(self._keys.delivery(delivery_id), ["tn", "br"])
        tenant, circuit = await cast(Awaitable[list[bytes | None]], found)
        return (tenant or b"default").decode(), (circuit or b"none").decode()

    async def _send(self, taken: Taken) -> Reply:
        hooks = await self._hooks(taken.tenant)
        if taken.endpoint_id != CALLBACK:
            endpoint = hooks.endpoints.get(taken.endpoint_id)
            if endpoint is None:
                return Reply(error="the endpoint was removed", is_final=True, is_ours=True)
            if not endpoint.is_on:
                why = f"the endpoint is off: {endpoint.off_reason}"
                return Reply(error=why, is_final=True, is_ours=True)
            active = active_values(endpoint.secrets, taken.now_ms)
            return await self._post(taken, endpoint.url, active)
        return await self._post(taken, taken.url, await self._callback_secrets(hooks, taken))

    async def _hooks(self, tenant: str) -> Hooks:
        found = self._client.hgetall(self._keys.hooks(tenant))
        return read_hooks(await cast(Awaitable[Mapping[bytes, bytes]], found))

    async def _callback_secrets(self, hooks: Hooks, taken: Taken) -> Sequence[str]:
        if active := active_values(hooks.callback_secrets, taken.now_ms):
            return active
        if self._settings.operator_secret:
            return (self._settings.operator_secret,)
        made = (Secret(new_secret()),)
        edit = calls.edit_hook(
            self._keys,
            tenant=taken.tenant,
            field=CALLBACK_FIELD,
            expected=hooks.raw.get(CALLBACK_FIELD, ""),
            new=stored_secrets(made),
        )
        if await run_async(self._client, edit) == Edited.DONE:
            return active_values(made, taken.now_ms)
        # Somebody was faster; it is theirs that receivers will know.
        return active_values((await self._hooks(taken.tenant)).callback_secrets, taken.now_ms)

    async def _post(self, taken: Taken, url: str, active: Sequence[str]) -> Reply:
        if not active:
            return Reply(error="there is no secret to sign with", is_final=True, is_ours=True)
        settings = self._settings
        try:
            async with asyncio.timeout(settings.total_seconds):
                target = check_target(url, allow_private=settings.allow_private)
                addresses = await pin(target, self._resolve, allow_private=settings.allow_private)
                stamp = taken.now_ms // 1000
                headers = signed_headers(active, taken.event_id, stamp, taken.body)
                return await post(target, addresses, headers, taken.body, await self._context())
        except Blocked as error:
            return Reply(
                error=str(error),
                is_final=error.is_final,
                is_ours=error.is_final,
                is_inside=error.is_inside,
            )
        except TimeoutError:
            return Reply(error=f"no answer within {settings.total_seconds:g} s")
        except ssl.SSLError as error:
            return Reply(error=f"TLS: {error.reason or type(error).__name__}")
        except OSError as error:
            return Reply(error=f"the connection failed: {type(error).__name__}")
        except h11.RemoteProtocolError:
            return Reply(error="the answer is not HTTP")

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            # Reading the certificates of all authorities would hold up the loop.
            self._tls = await asyncio.to_thread(_default_tls)
        return self._tls

    async def _mark(self, delivery_id: str, taken: Taken, reply: Reply, seconds: float) -> str:
        verdict = judge(
            reply,
            tries=taken.tries,
            failures=taken.failures,
            endpoint_id=taken.endpoint_id,
            chance=random.random(),
        )
        mark = Mark(
            verdict.outcome,
            note(taken, reply, seconds),
            verdict.counts,
            verdict.pause_ms,
            verdict.cooldown_ms,
            verdict.off_reason,
        )
        call = calls.mark_delivery(self._keys, delivery_id=delivery_id, taken=taken, mark=mark)
        state = await run_async(self._client, call)
        _tell(delivery_id, taken, reply, verdict, seconds)
        return state


@functools.cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def note(taken: Taken, reply: Reply, seconds: float) -> str:
    """Return what the log keeps of an attempt; never what the receiver said."""
    return json.dumps(
        {
            "t": taken.now_ms,
            "ms": round(seconds * 1000),
            "status": reply.status,
            "error": reply.error[:MAX_ERROR_CHARS],
        },
        separators=(",", ":"),
    )


def _tell(delivery_id: str, taken: Taken, reply: Reply, verdict: Verdict, seconds: float) -> None:
    metrics.ATTEMPTS.labels(verdict.outcome).inc()
    metrics.ATTEMPT_SECONDS.observe(seconds)
    if verdict.off_reason:
        metrics.SWITCHED_OFF.inc()
        _log.warning("switched off %s: %s", taken.endpoint_id, verdict.off_reason)
    _log.info(
        "%s attempt %d: %s, %s",
        delivery_id,
        taken.attempt,
        reply.status or reply.error,
        verdict.outcome,
    )
