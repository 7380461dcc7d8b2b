"""A tenant's endpoints and secrets, as they are stored, and the edits that change them; pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tidemill.protocol.calls.webhooks import CALLBACK, endpoint_field, off_field
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.ids import new_ulid
from tidemill.service.web_targets import Blocked, check_target
from tidemill_webhooks.events import EVENT_TYPES, is_pattern
from tidemill_webhooks.signing import new_secret

#: How long the secret before stays in use after a rotation.
ROTATION_SECONDS = 24 * 3600
#: Secrets in use at once: each makes the signature header longer.
MAX_SECRETS = 4

CALLBACK_FIELD = "cb"

_PREFIX = "we_"


@dataclass(frozen=True, slots=True)
class Secret:
    """What deliveries are signed with, until ``until_ms``; 0 for ever."""

    value: str
    until_ms: int = 0

    def is_active(self, now_ms: int) -> bool:
        """Whether it is still in use."""
        return self.until_ms == 0 or now_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address of a tenant that wants events; no ``events`` means all.

    ``off_reason`` is empty while it is on.  ``secrets`` has the newest first.
    """

    endpoint_id: str
    url: str
    secrets: tuple[Secret, ...]
    events: tuple[str, ...] = ()
    description: str = ""
    created_ms: int = 0
    off_reason: str = ""

    @property
    def is_on(self) -> bool:
        """Whether events are sent to it."""
        return not self.off_reason

    @property
    def field(self) -> str:
        """Where it is stored."""
        return endpoint_field(self.endpoint_id)

    def stored(self) -> str:
        """Return it as it is stored, but for whether it is on."""
        return json.dumps(
            {
                "url": self.url,
                "secrets": _plain(self.secrets),
                "events": list(self.events),
                "description": self.description,
                "created": self.created_ms,
            },
            separators=(",", ":"),
        )


@dataclass(frozen=True, slots=True)
class Hooks:
    """All webhooks of a tenant; ``raw`` is what was read, for edits that compare."""

    endpoints: Mapping[str, Endpoint]
    callback_secrets: tuple[Secret, ...]
    raw: Mapping[str, str]

    def endpoint(self, endpoint_id: str) -> Endpoint:
        """Return an endpoint; raises ``InvalidRequest``."""
        try:
            return self.endpoints[endpoint_id]
        except KeyError as error:
            raise InvalidRequest(
                f"endpoint: the tenant has none called {endpoint_id[:100]!r}",
                field="endpoint",
                fix="See `tidemill webhooks list`.",
            ) from error


def new_endpoint(
    url: str,
    *,
    events: tuple[str, ...],
    description: str,
    secret: str | None,
    now_ms: int,
    allow_private: bool,
) -> Endpoint:
    """Return a new endpoint; raises ``InvalidRequest`` if nothing may be sent there."""
    try:
        check_target(url, allow_private=allow_private)
    except Blocked as error:
        raise InvalidRequest(f"url: {error}", field="url") from error
    if unknown := [name for name in events if not is_pattern(name)]:
        raise InvalidRequest(
            f"events: there is no {unknown[0][:100]!r}",
            field="events",
            fix=f"Choose from response.*, batch.*, {', '.join(EVENT_TYPES)}.",
        )
    secrets = (Secret(secret or new_secret()),)
    return Endpoint(f"{_PREFIX}{new_ulid()}", url, secrets, events, description, now_ms)


def rotated(
    secrets: tuple[Secret, ...], value: str, *, now_ms: int, grace_seconds: float
) -> tuple[Secret, ...]:
    """Return the secrets after a rotation: those before are in use for ``grace_seconds`` more."""
    until = now_ms + round(grace_seconds * 1000)
    older = tuple(
        secret if 0 < secret.until_ms < until else replace(secret, until_ms=until)
        for secret in secrets
        if secret.is_active(now_ms) and grace_seconds > 0
    )
    return (Secret(value), *older)[:MAX_SECRETS]


def active_values(secrets: tuple[Secret, ...], now_ms: int) -> tuple[str, ...]:
    """Return the secrets that a delivery is signed with now, the newest first."""
    return tuple(secret.value for secret in secrets if secret.is_active(now_ms))


def stored_secrets(secrets: tuple[Secret, ...]) -> str:
    """Return the secrets of callbacks as they are stored."""
    return json.dumps(_plain(secrets), separators=(",", ":"))


def read_hooks(fields: Mapping[bytes, bytes]) -> Hooks:
    """Return what a tenant's hash says; an endpoint that cannot be read is left out."""
    raw = {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for name, value in fields.items()
    }
    prefix = endpoint_field("")
    endpoints = {
        endpoint_id: endpoint
        for name, value in raw.items()
        if name.startswith(prefix) and (endpoint_id := name.removeprefix(prefix)) != CALLBACK
        if (endpoint := _read_endpoint(endpoint_id, value, raw.get(off_field(endpoint_id), "")))
    }
    return Hooks(endpoints, _read_secrets(_json(raw.get(CALLBACK_FIELD, "[]"))), raw)


def _read_endpoint(endpoint_id: str, value: str, off_reason: str) -> Endpoint | None:
    stored = _json(value)
    if not isinstance(stored, dict) or not isinstance(stored.get("url"), str):
        return None
    return Endpoint(
        endpoint_id=endpoint_id,
        url=stored["url"],
        secrets=_read_secrets(stored.get("secrets")),
        events=tuple(str(name) for name in stored.get("events") or ()),
        description=str(stored.get("description", "")),
        created_ms=int(stored.get("created", 0)),
        off_reason=off_reason,
    )


def _read_secrets(stored: Any) -> tuple[Secret, ...]:
    if not isinstance(stored, list):
        return ()
    return tuple(Secret(str(value), int(until)) for value, until in stored)


def _plain(secrets: tuple[Secret, ...]) -> list[list[str | int]]:
    return [[secret.value, secret.until_ms] for secret in secrets]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
