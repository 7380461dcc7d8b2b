"""From the outbox to deliveries: each entry once, whoever dies meanwhile."""

import hashlib
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import cast

import redis.asyncio

from tidemill.protocol.calls import webhooks as calls
from tidemill.protocol.calls.webhooks import CALLBACK, Posting
from tidemill.protocol.errors import TidemillError
from tidemill.protocol.functions import Call, run_many_async
from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import crash_point
from tidemill.service.web_targets import Blocked, check_target
from tidemill_webhooks import metrics
from tidemill_webhooks.endpoints import Endpoint, Hooks, read_hooks
from tidemill_webhooks.events import Event, read_entry, wants

_log = logging.getLogger(__name__)

#: Entries of one round trip.
_PAGE_SIZE = 128

_Entry = tuple[str, Event | None]


class Outbox:
    """Reads the outbox of one shard; any number may do so at once."""

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys) -> None:
        self._client = client
        self._keys = keys

    async def work_off(self) -> int:
        """Turn the oldest entries into deliveries; returns how many there were."""
        found = await cast(
            Awaitable[list[tuple[bytes, Mapping[bytes, bytes]]]],
            self._client.xrange(self._keys.outbox, count=_PAGE_SIZE),
        )
        entries = [(entry_id.decode(), read_entry(fields)) for entry_id, fields in found]
        if not entries:
            return 0
        crash_point("webhooks.after_read")
        hooks = await self._hooks(sorted({event.tenant for _, event in entries if event}))
        posts = [self._post(entry, hooks) for entry in entries]
        for reply in await run_many_async(self._client, posts):
            if isinstance(reply, TidemillError):
                raise reply
        crash_point("webhooks.after_post")
        return len(entries)

    async def _hooks(self, tenants: Sequence[str]) -> dict[str, Hooks]:
        async with self._client.pipeline(transaction=False) as pipe:
            for tenant in tenants:
                pipe.hgetall(self._keys.hooks(tenant))
            found = await pipe.execute()
        return {tenant: read_hooks(fields) for tenant, fields in zip(tenants, found, strict=True)}

    def _post(self, entry: _Entry, hooks: Mapping[str, Hooks]) -> Call[bool]:
        entry_id, event = entry
        if event is None:
            metrics.UNREADABLE.inc()
            _log.warning("an entry of the outbox says nothing: %s", entry_id)
            event = Event("", "", "", "default", 0)
            return self._call(entry_id, event, ())
        metrics.EVENTS.labels(event.event_type).inc()
        places = postings(event, hooks[event.tenant].endpoints.values())
        metrics.POSTED.inc(len(places))
        return self._call(entry_id, event, places)

    def _call(self, entry_id: str, event: Event, places: Sequence[Posting]) -> Call[bool]:
        return calls.post_event(
            self._keys,
            entry_id=entry_id,
            tenant=event.tenant,
            event_type=event.event_type,
            event_id=event.event_id,
            body=event.body,
            postings=places,
        )


def postings(event: Event, endpoints: Iterable[Endpoint]) -> list[Posting]:
    """Return where an event goes: to the endpoints that want it, and to its own address."""
    if event.only_endpoint:
        chosen = [one for one in endpoints if one.endpoint_id == event.only_endpoint]
    elif event.is_line:
        chosen = []
    else:
        chosen = [one for one in endpoints if one.is_on and wants(one.events, event.event_type)]
    places = [
        Posting(f"{event.event_id}-{one.endpoint_id}", one.endpoint_id, one.url, one.endpoint_id)
        for one in chosen
    ]
    if event.callback_url:
        place = f"{event.event_id}-{CALLBACK}"
        circuit = callback_circuit(event.tenant, event.callback_url)
        places.append(Posting(place, CALLBACK, event.callback_url, circuit))
    return places


def callback_circuit(tenant: str, url: str) -> str:
    """Return what fails together among a tenant's callbacks: those to one host and port."""
    try:
        origin = check_target(url, allow_private=True).origin
    except Blocked:
        origin = url
    return f"cb-{hashlib.sha256(f'{tenant} {origin}'.encode()).hexdigest()[:24]}"
