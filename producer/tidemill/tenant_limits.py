"""What operators allow each tenant: bounds on waiting jobs and tokens, rates, back doors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tidemill._link import Link
from tidemill._reads import Read
from tidemill._receipt import PlainCommand
from tidemill._request import check_tenant
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.functions import Field
from tidemill.protocol.keys import ShardKeys

#: Stands for every tenant without a setting of its own.
EVERYONE = "*"

#: Lua counts exactly up to here.
_MAX_VALUE = 2**53


class Setting(StrEnum):
    """A setting's name in the ``cfg`` hash; the last two are of the whole shard."""

    MAX_JOBS = "jobs"
    MAX_TOKENS = "tokens"
    REQUESTS_PER_MINUTE = "rpm"
    TOKENS_PER_MINUTE = "tpm"
    BACK_DOOR = "back"
    MAX_BYTES = "bytes"
    MAX_RESULT_BYTES = "result_bytes"


OF_SHARD = frozenset({Setting.MAX_BYTES, Setting.MAX_RESULT_BYTES})


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What is set for one tenant, or for ``*``, and what it has in the queue now."""

    tenant: str
    settings: Mapping[Setting, int]
    queued_jobs: int = 0
    queued_tokens: int = 0


class LimitSettings:
    """Reads and writes the settings of one shard; they hold at once."""

    def __init__(self, link: Link, keys: ShardKeys) -> None:
        self._link = link
        self._keys = keys

    def read(self) -> list[TenantLimits]:
        """Return everyone who has a setting or a waiting job; ``*`` first."""
        commands = (("HGETALL", self._keys.settings), ("HGETALL", self._keys.counters))
        return self._link.read(Read(commands, lambda replies: limits_of(*replies)))

    def set(self, tenant: str, values: Mapping[Setting, int]) -> None:
        """Set limits; raises ``ConfigError`` or ``InvalidRequest`` before anything is changed."""
        fields = {_field(tenant, name): _checked(name, value) for name, value in values.items()}
        pairs = [part for pair in fields.items() for part in pair]
        self._change(("HSET", self._keys.settings, *pairs))

    def unset(self, tenant: str, names: Iterable[Setting]) -> int:
        """Take settings away, so that those for everyone hold; returns how many there were."""
        fields = [_field(tenant, name) for name in names]
        return self._change(("HDEL", self._keys.settings, *fields))

    def _change(self, command: tuple[Field, ...]) -> int:
        # Both commands may be sent twice.
        return self._link.call(PlainCommand("", (), command, int))


def limits_of(
    settings: Mapping[bytes, bytes], counters: Mapping[bytes, bytes]
) -> list[TenantLimits]:
    """Read the ``cfg`` and ``cnt`` hashes: everyone who has a setting or a waiting job."""
    found: dict[str, dict[Setting, int]] = {}
    for field, value in settings.items():
        name, _, tenant = field.decode("utf-8", "replace").partition(":")
        if name in set(Setting) and value.isdigit():
            found.setdefault(tenant or EVERYONE, {})[Setting(name)] = int(value)
    queued = {key[2:].decode(): int(n) for key, n in counters.items() if key.startswith(b"q:")}
    tokens = {key[3:].decode(): int(n) for key, n in counters.items() if key.startswith(b"qt:")}
    tenants = sorted(found.keys() | queued.keys() | tokens.keys(), key=_everyone_first)
    return [
        TenantLimits(tenant, found.get(tenant, {}), queued.get(tenant, 0), tokens.get(tenant, 0))
        for tenant in tenants
    ]


def _field(tenant: str, name: Setting) -> str:
    if tenant != EVERYONE:
        check_tenant(tenant)
    if name not in OF_SHARD:
        return f"{name}:{tenant}"
    if tenant != EVERYONE:
        raise ConfigError(
            f"{_option(name)} is a bound of the whole shard, not of tenant {tenant!r}",
            fix=f"Set it for {EVERYONE!r}.",
        )
    return name.value


def _checked(name: Setting, value: int) -> int:
    if not 0 <= value <= _MAX_VALUE:
        raise ConfigError(f"{_option(name)} is {value}, but must be between 0 and {_MAX_VALUE}")
    return value


def _option(name: Setting) -> str:
    return f"--{name.name.lower().replace('_', '-')}"


def _everyone_first(tenant: str) -> tuple[bool, str]:
    return tenant != EVERYONE, tenant
