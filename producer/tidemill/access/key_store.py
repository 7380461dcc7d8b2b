"""The keys of one shard in Redis: making, listing and revoking them, and finding one."""

from dataclasses import replace

from tidemill._link import Link
from tidemill._reads import Read, now_ms
from tidemill._receipt import PlainCommand
from tidemill._request import check_tenant
from tidemill.access.api_keys import (
    MAX_PER_MINUTE,
    USUAL_SCOPES,
    ApiKey,
    KeyScope,
    Token,
    checked_name,
    expiry_field,
    new_token,
    read_key,
    read_keys,
)
from tidemill.protocol.calls.access import KeyLimits
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.functions import Field
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.stored import stored_text


def find_key(keys: ShardKeys, key_id: str) -> Read[tuple[ApiKey | None, int]]:
    """Read one key, and the server's time in ms."""
    return Read(
        (("HMGET", keys.api_keys, key_id, expiry_field(key_id)), ("TIME",)),
        lambda replies: (read_key(key_id, *replies[0]), now_ms(replies[1])),
    )


class KeyStore:
    """What operators do with the keys of one shard; gateways heed it within seconds.

    What stands of a key never changes but for its expiry, in a field of its own: so a key that is
    revoked while another operator rotates it stays revoked.
    """

    def __init__(self, link: Link, keys: ShardKeys, pepper: bytes = b"") -> None:
        self._link = link
        self._keys = keys
        self._pepper = pepper

    def create(
        self,
        tenant: str,
        *,
        scopes: frozenset[KeyScope] = USUAL_SCOPES,
        name: str = "",
        expires_seconds: float | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> tuple[Token, ApiKey]:
        """Make a key and return it with its secret, which is told only now.

        Raises ``InvalidRequest``.
        """
        token, now = new_token(self._keys.shard), self._now_ms()
        key = ApiKey(
            key_id=token.key_id,
            tenant=check_tenant(tenant),
            scopes=scopes,
            digest=token.digest(self._pepper),
            name=checked_name(name),
            created_ms=now,
            limits=KeyLimits(
                _checked_rate("requests_per_minute", requests_per_minute),
                _checked_rate("tokens_per_minute", tokens_per_minute),
            ),
            expires_ms=None if expires_seconds is None else now + _ms(expires_seconds),
        )
        self._add(key)
        return token, key

    def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first, also those that have expired."""
        commands = (("HGETALL", self._keys.api_keys), ("HGETALL", self._keys.api_key_uses))
        return self._link.read(Read(commands, lambda replies: read_keys(*replies)))

    def rotate(self, key_id: str, *, grace_seconds: float) -> tuple[Token, ApiKey]:
        """Make a key like another one, which expires after ``grace_seconds``.

        Raises ``InvalidRequest``.
        """
        old, now = self._link.read(find_key(self._keys, key_id))
        if old is None or old.is_expired(now):
            raise _unknown(key_id)
        token = new_token(self._keys.shard)
        new = replace(old, key_id=token.key_id, digest=token.digest(self._pepper), created_ms=now)
        self._add(new)
        until = now + _ms(grace_seconds)
        if old.expires_ms is None or until < old.expires_ms:
            fields = (expiry_field(key_id), until)
            self._link.call(_command("HSET", self._keys.api_keys, *fields))
        return token, new

    def revoke(self, key_id: str) -> None:
        """Take a key away, and what is left of others.  Raises ``InvalidRequest``."""
        fields = (key_id, expiry_field(key_id))
        known = self._link.read(find_key(self._keys, key_id))[0]
        self._link.call(_command("HDEL", self._keys.api_keys, *fields))
        self._link.call(_command("HDEL", self._keys.api_key_uses, key_id))
        self._sweep()
        if known is None:
            raise _unknown(key_id)

    def _add(self, key: ApiKey) -> None:
        fields: list[Field] = [key.key_id, key.stored()]
        if key.expires_ms is not None:
            fields += [expiry_field(key.key_id), key.expires_ms]
        # Sent again after a lost reply it writes the same.
        self._link.call(_command("HSET", self._keys.api_keys, *fields))

    def _sweep(self) -> None:
        # A rotation may write the expiry of a key that was revoked a moment ago.
        names = self._link.read(
            Read(
                (("HKEYS", self._keys.api_keys),),
                lambda replies: {stored_text(name) for name in replies[0]},
            )
        )
        known = {name for name in names if not name.startswith(expiry_field(""))}
        if stray := names - known - {expiry_field(key_id) for key_id in known}:
            self._link.call(_command("HDEL", self._keys.api_keys, *stray))

    def _now_ms(self) -> int:
        return self._link.read(Read((("TIME",),), lambda replies: now_ms(replies[0])))


def _command(*words: Field) -> PlainCommand[int]:
    return PlainCommand("", (), words, int)


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _checked_rate(field: str, per_minute: int | None) -> int | None:
    if per_minute is not None and not 0 <= per_minute <= MAX_PER_MINUTE:
        raise InvalidRequest(
            f"{field}: it must be 0 to {MAX_PER_MINUTE}",
            field=field,
            fix="Leave it out for no bound.",
        )
    return per_minute


def _unknown(key_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"key: there is none with the id {key_id[:40]!r}",
        field="key",
        fix="See `tidemill keys list`; an id is what stands between tmk_ and the next _.",
    )
