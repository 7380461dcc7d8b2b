"""What operators do with a tenant's webhooks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidemill._link import Link
from tidemill._reads import Read
from tidemill.protocol.calls import webhooks as calls
from tidemill.protocol.calls.webhooks import AS_IT_IS, Edited
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.ids import new_ulid
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.stored import stored_number, stored_text
from tidemill_webhooks.endpoints import (
    CALLBACK_FIELD,
    ROTATION_SECONDS,
    Endpoint,
    Hooks,
    active_values,
    new_endpoint,
    read_hooks,
    rotated,
    stored_secrets,
)
from tidemill_webhooks.signing import check_secret, new_secret

_PAGE_SIZE = 200
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Attempt:
    """A line of a delivery's log; ``status`` is 0 if there was no answer."""

    number: int
    time_ms: int
    milliseconds: int
    status: int
    error: str


@dataclass(frozen=True, slots=True)
class DeliveryView:
    """A delivery as it is now; ``due_ms`` is when it is tried next, None if it has ended."""

    delivery_id: str
    state: str
    event_type: str
    about: str
    endpoint_id: str
    url: str
    created_ms: int
    due_ms: int | None
    attempts: tuple[Attempt, ...]


class HookAdmin:
    """Reads and changes the webhooks of one tenant; changes hold for events from then on."""

    def __init__(self, link: Link, keys: ShardKeys, tenant: str) -> None:
        self._link = link
        self._keys = keys
        self._tenant = tenant

    def hooks(self) -> Hooks:
        """Return the tenant's endpoints and secrets."""
        command = ("HGETALL", self._keys.hooks(self._tenant))
        return self._link.read(Read((command,), lambda replies: read_hooks(replies[0])))

    def add(
        self,
        url: str,
        *,
        events: Sequence[str] = (),
        description: str = "",
        secret: str | None = None,
        allow_private: bool = False,
    ) -> Endpoint:
        """Add an endpoint, which is on; raises ``InvalidRequest``."""
        endpoint = new_endpoint(
            url,
            events=tuple(events),
            description=description,
            secret=None if secret is None else check_secret(secret),
            now_ms=self._now_ms(),
            allow_private=allow_private,
        )
        edited = self._edit(endpoint.field, "", endpoint.stored(), off="")
        if edited == Edited.TOO_MANY:
            raise InvalidRequest(
                f"endpoint: the tenant has {calls.MAX_ENDPOINTS} already",
                field="endpoint",
                fix="Remove one that is not used any more.",
            )
        return endpoint

    def remove(self, endpoint_id: str) -> None:
        """Remove an endpoint; what was on its way to it is given up.  Raises ``InvalidRequest``."""
        self._change(endpoint_id, lambda _: None, off="")

    def switch(self, endpoint_id: str, off_reason: str) -> None:
        """Switch an endpoint on ("") or off, for a reason.  Raises ``InvalidRequest``."""
        self._change(endpoint_id, lambda endpoint: endpoint, off=off_reason)

    def rotate(
        self,
        endpoint_id: str,
        *,
        secret: str | None = None,
        grace_seconds: float = ROTATION_SECONDS,
    ) -> str:
        """Give an endpoint a new secret, and sign with the old one too for a while.

        Returns the new one; raises ``InvalidRequest``.
        """
        value, now_ms = check_secret(secret or new_secret()), self._now_ms()

        def renew(endpoint: Endpoint) -> Endpoint:
            secrets = rotated(endpoint.secrets, value, now_ms=now_ms, grace_seconds=grace_seconds)
            return replace(endpoint, secrets=secrets)

        self._change(endpoint_id, renew)
        return value

    def callback_secret(self) -> str | None:
        """Return what callbacks of the tenant's jobs are signed with, None if nothing was yet."""
        active = active_values(self.hooks().callback_secrets, self._now_ms())
        return active[0] if active else None

    def rotate_callback_secret(
        self, *, secret: str | None = None, grace_seconds: float = ROTATION_SECONDS
    ) -> str:
        """Give the tenant's callbacks a new secret, as ``rotate`` does."""
        value, now_ms = check_secret(secret or new_secret()), self._now_ms()
        for _ in range(_TRIES):
            hooks = self.hooks()
            secrets = rotated(
                hooks.callback_secrets, value, now_ms=now_ms, grace_seconds=grace_seconds
            )
            before = hooks.raw.get(CALLBACK_FIELD, "")
            if self._edit(CALLBACK_FIELD, before, stored_secrets(secrets)) == Edited.DONE:
                return value
        raise _contended()

    def test(self, endpoint_id: str) -> str:
        """Send a test event to an endpoint, also one that is off; returns the delivery's id."""
        self.hooks().endpoint(endpoint_id)
        event_id = f"evt_test{new_ulid()}"
        self._link.call(
            calls.test_hook(
                self._keys, tenant=self._tenant, endpoint_id=endpoint_id, event_id=event_id
            )
        )
        return f"{event_id}-{endpoint_id}"

    def deliveries(self, *, limit: int = 50) -> Iterator[DeliveryView]:
        """Iterate over the tenant's deliveries, the newest first."""
        for start in range(0, limit, _PAGE_SIZE):
            last = min(start + _PAGE_SIZE, limit) - 1
            command = ("ZRANGE", self._keys.delivery_log(self._tenant), start, last, "REV")
            ids: list[bytes] = self._link.read(Read((command,), lambda replies: replies[0]))
            yield from filter(None, self._views([raw.decode() for raw in ids]))
            if len(ids) < _PAGE_SIZE:
                return

    def delivery(self, delivery_id: str) -> DeliveryView | None:
        """Return one delivery, None if it is not known or another tenant's."""
        [view] = self._views([delivery_id])
        return view

    def replay(self, delivery_id: str) -> bool:
        """Deliver again what may have been delivered, under the same event id.

        False while an attempt runs.  Raises ``InvalidRequest`` if there is no such delivery.
        """
        if self.delivery(delivery_id) is None:
            raise InvalidRequest(
                f"delivery: there is none called {delivery_id[:100]!r}",
                field="delivery",
                fix="See `tidemill webhooks deliveries`.",
            )
        return self._link.call(calls.replay_delivery(self._keys, delivery_id=delivery_id)) == 1

    def _views(self, ids: Sequence[str]) -> list[DeliveryView | None]:
        if not ids:
            return []
        commands = tuple(("HGETALL", self._keys.delivery(delivery_id)) for delivery_id in ids)
        rows: list[Mapping[bytes, bytes]] = self._link.read(Read(commands, list))
        return [
            _view(delivery_id, row) if stored_text(row.get(b"tn", b"")) == self._tenant else None
            for delivery_id, row in zip(ids, rows, strict=True)
        ]

    def _change(self, endpoint_id: str, change: Any, *, off: str = AS_IT_IS) -> None:
        for _ in range(_TRIES):
            hooks = self.hooks()
            endpoint = hooks.endpoint(endpoint_id)
            changed: Endpoint | None = change(endpoint)
            new = "" if changed is None else changed.stored()
            if self._edit(endpoint.field, hooks.raw[endpoint.field], new, off=off) == Edited.DONE:
                return
        raise _contended()

    def _edit(self, field: str, expected: str, new: str, *, off: str = AS_IT_IS) -> Edited:
        return self._link.call(
            calls.edit_hook(
                self._keys, tenant=self._tenant, field=field, expected=expected, new=new, off=off
            )
        )

    def _now_ms(self) -> int:
        seconds, micros = self._link.read(Read((("TIME",),), lambda replies: replies[0]))
        return int(seconds) * 1000 + int(micros) // 1000


def _contended() -> InvalidRequest:
    return InvalidRequest(
        "endpoint: somebody else keeps changing it", field="endpoint", fix="Try again."
    )


def _view(delivery_id: str, row: Mapping[bytes, bytes]) -> DeliveryView:
    def text(name: bytes) -> str:
        return stored_text(row.get(name, b""))

    state = text(b"st")
    return DeliveryView(
        delivery_id=delivery_id,
        state=state,
        event_type=text(b"ty"),
        about=_about(row.get(b"bd", b"")),
        endpoint_id=text(b"ep"),
        url=text(b"url"),
        created_ms=stored_number(row.get(b"cr")) or 0,
        due_ms=stored_number(row.get(b"du")) if state == "pending" else None,
        attempts=_attempts(row),
    )


def _about(body: bytes) -> str:
    try:
        return str(json.loads(body)["data"]["id"])
    except (ValueError, KeyError, TypeError):
        return ""


def _attempts(row: Mapping[bytes, bytes]) -> tuple[Attempt, ...]:
    numbers = sorted(int(name[1:]) for name in row if name[:1] == b"a" and name[1:].isdigit())
    return tuple(_attempt(number, row[b"a%d" % number]) for number in numbers)


def _attempt(number: int, note: bytes) -> Attempt:
    try:
        told = json.loads(note)
        return Attempt(number, told["t"], told["ms"], told["status"], told["error"])
    except (ValueError, KeyError, TypeError):
        return Attempt(number, 0, 0, 0, "its note cannot be read")
