"""What operators set for each tenant: bounds on waiting jobs and tokens, rates, its weight."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidemill._link import Link
from tidemill._reads import Read
from tidemill._receipt import PlainCommand
from tidemill._request import check_tenant
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.functions import Field
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.settings import (
    EVERYONE,
    MAX_VALUE,
    MAX_WEIGHT,
    MIN_WEIGHT,
    OF_SHARD,
    Setting,
    setting_of,
    value_of,
)
from tidemill.protocol.stored import stored_numbers, stored_text

__all__ = ["EVERYONE", "OF_SHARD", "LimitSettings", "Setting", "TenantLimits", "limits_of"]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What is set for one tenant, or for ``*``, and what it has in the queue now.

    ``invalid`` maps settings without a usable value to what stands there: they do not limit as
    was meant.  Those of unknown names are with ``*``.
    """

    tenant: str
    settings: Mapping[Setting, float]
    queued_jobs: int = 0
    queued_tokens: int = 0
    invalid: Mapping[str, str] = field(default_factory=dict)


class LimitSettings:
    """Reads and writes the settings of one shard; they hold at once."""

    def __init__(self, link: Link, keys: ShardKeys) -> None:
        self._link = link
        self._keys = keys

    def read(self) -> list[TenantLimits]:
        """Return everyone who has a setting or a waiting job; ``*`` first."""
        commands = (("HGETALL", self._keys.settings), ("HGETALL", self._keys.counters))
        return self._link.read(Read(commands, lambda replies: limits_of(*replies)))

    def set(self, tenant: str, values: Mapping[Setting, float]) -> None:
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
    found: dict[str, dict[Setting, float]] = {}
    invalid: dict[str, dict[str, str]] = {}
    for name, value in settings.items():
        place = setting_of(name)
        number = None if place is None else value_of(place[1], value)
        if place is None or number is None:
            tenant, wrong = (EVERYONE, stored_text(name)) if place is None else place
            invalid.setdefault(tenant, {})[str(wrong)] = stored_text(value)
        else:
            found.setdefault(place[0], {})[place[1]] = number
    numbers = stored_numbers(counters)
    queued, tokens = (
        {name.removeprefix(kind): n for name, n in numbers.items() if name.startswith(kind)}
        for kind in ("q:", "qt:")
    )
    tenants = found.keys() | invalid.keys() | queued.keys() | tokens.keys()
    return [
        TenantLimits(
            tenant,
            found.get(tenant, {}),
            queued.get(tenant, 0),
            tokens.get(tenant, 0),
            invalid.get(tenant, {}),
        )
        for tenant in sorted(tenants, key=_everyone_first)
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


def _checked(name: Setting, value: float) -> float:
    low, high = (MIN_WEIGHT, MAX_WEIGHT) if name is Setting.WEIGHT else (0, MAX_VALUE)
    if not low <= value <= high:
        raise ConfigError(f"{_option(name)} is {value}, but must be between {low} and {high:g}")
    return value


def _option(name: Setting) -> str:
    return f"--{name.name.lower().replace('_', '-')}"


def _everyone_first(tenant: str) -> tuple[bool, str]:
    return tenant != EVERYONE, tenant
