"""What an API key is and what is stored of it; pure but for the randomness of new ones."""

import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any

from tidemill.protocol.calls.access import NO_LIMITS, KeyLimits
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.ids import new_ulid
from tidemill.protocol.stored import stored_text

_TOKEN = re.compile(r"tmk_([0-9a-f]{2}[0-9A-HJKMNP-TV-Z]{26})_([A-Za-z0-9_-]{43})")
_SECRET_BYTES = 32

#: Before the id of a key, in the store: when it ceases to be valid.
_EXPIRY = "x:"

MAX_NAME = 100
MAX_PER_MINUTE = 10**9


class KeyScope(StrEnum):
    """What a key may allow."""

    SUBMIT = "submit"
    READ = "read"
    CANCEL = "cancel"
    ADMIN = "admin"


ALL_SCOPES = frozenset(KeyScope)
#: What most callers need: their own work.
USUAL_SCOPES = frozenset({KeyScope.SUBMIT, KeyScope.READ, KeyScope.CANCEL})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it is stored: everything but its secret, of which there is a digest alone.

    Times are in ms of the server's clock, None for never.  ``limits`` are beside what bounds the
    tenant.
    """

    key_id: str
    tenant: str
    scopes: frozenset[KeyScope]
    digest: bytes
    name: str = ""
    created_ms: int = 0
    limits: KeyLimits = NO_LIMITS
    expires_ms: int | None = None
    used_ms: int | None = None

    def is_expired(self, now_ms: int) -> bool:
        """Whether it ceased to be valid."""
        return self.expires_ms is not None and self.expires_ms <= now_ms

    def stored(self) -> str:
        """Return what never changes of it, as it is stored."""
        told = {
            "tenant": self.tenant,
            "scopes": sorted(self.scopes),
            "digest": self.digest.hex(),
            "name": self.name,
            "created": self.created_ms,
            "rpm": self.limits.requests,
            "tpm": self.limits.tokens,
        }
        return json.dumps(told, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Token:
    """What a caller sends, taken apart; never to be logged."""

    key_id: str
    text: str

    @property
    def shard(self) -> str:
        """The shard that has the key."""
        return shard_of_key(self.key_id)

    def digest(self, pepper: bytes) -> bytes:
        """Return what is stored of it: the secret has 256 random bits, so one HMAC will do."""
        return hmac.new(pepper, self.text.encode(), sha256).digest()


def new_token(shard: str) -> Token:
    """Return a new key of a shard."""
    key_id = f"{shard}{new_ulid()}"
    return Token(key_id, f"tmk_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}")


def parse_token(text: str) -> Token | None:
    """Take a bearer token apart; None if it has not the form of a key."""
    match = _TOKEN.fullmatch(text)
    return match and Token(match.group(1), text)


def shard_of_key(key_id: str) -> str:
    """Return the shard whose store has a key."""
    return key_id[:2]


def expiry_field(key_id: str) -> str:
    """Return the field of the store that tells when a key ceases to be valid."""
    return f"{_EXPIRY}{key_id}"


def checked_name(name: str) -> str:
    """Return the name of a key; raises ``InvalidRequest``."""
    if len(name) > MAX_NAME or not (name.isprintable() or not name):
        raise InvalidRequest(
            f"name: it must have at most {MAX_NAME} printable characters",
            field="name",
            fix="Choose a shorter one.",
        )
    return name


def checked_scopes(names: Iterable[str]) -> frozenset[KeyScope]:
    """Return scopes by their names; raises ``InvalidRequest``."""
    try:
        scopes = frozenset(KeyScope(name) for name in names)
    except ValueError as error:
        raise InvalidRequest(
            f"scope: {error}", field="scope", fix=f"Choose from {', '.join(KeyScope)}."
        ) from error
    if not scopes:
        raise InvalidRequest("scope: a key needs one", field="scope", fix="Name at least one.")
    return scopes


def read_key(
    key_id: str, stored: bytes | None, expiry: bytes | None, used: bytes | None = None
) -> ApiKey | None:
    """Return a key as the store tells it; None if there is none, or none that can be read."""
    try:
        told = json.loads(stored or b"null")
        return told and _read(key_id, told, expiry, used)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_keys(fields: Mapping[bytes, bytes], uses: Mapping[bytes, bytes]) -> list[ApiKey]:
    """Return all keys of a store, the oldest first."""
    raw = {stored_text(name): value for name, value in fields.items()}
    used = {stored_text(name): value for name, value in uses.items()}
    found = (
        read_key(key_id, value, raw.get(expiry_field(key_id)), used.get(key_id))
        for key_id, value in raw.items()
        if not key_id.startswith(_EXPIRY)
    )
    return sorted(filter(None, found), key=lambda key: (key.created_ms, key.key_id))


def _read(key_id: str, told: Mapping[str, Any], expiry: bytes | None, used: bytes | None) -> ApiKey:
    bounds = (told.get("rpm"), told.get("tpm"))
    return ApiKey(
        key_id=key_id,
        tenant=str(told["tenant"]),
        scopes=frozenset(KeyScope(name) for name in told["scopes"]),
        digest=bytes.fromhex(told["digest"]),
        name=str(told.get("name", "")),
        created_ms=int(told.get("created", 0)),
        limits=KeyLimits(*(None if bound is None else int(bound) for bound in bounds)),
        expires_ms=_number(expiry),
        used_ms=_number(used),
    )


def _number(value: bytes | None) -> int | None:
    return None if value is None else int(value)
