"""What operators set for tenants and shards, and which of it nobody can use."""

import re
from collections.abc import Mapping
from enum import StrEnum

from tidemill.protocol.stored import is_text, shown, stored_number, stored_text

#: Stands for every tenant without a setting of its own.
EVERYONE = "*"

#: Lua counts exactly up to here.
MAX_VALUE = 2**53

#: Bounds of a tenant's weight.
MIN_WEIGHT = 0.1
MAX_WEIGHT = 100.0

_DECIMAL = re.compile(rb"\d{1,3}(\.\d{1,9})?")


class Setting(StrEnum):
    """A setting's name in the ``cfg`` hash; the last two are of the whole shard."""

    MAX_JOBS = "jobs"
    MAX_TOKENS = "tokens"
    REQUESTS_PER_MINUTE = "rpm"
    TOKENS_PER_MINUTE = "tpm"
    BACK_DOOR = "back"
    WEIGHT = "weight"
    MAX_RESPONSE_BYTES = "response_bytes"
    MAX_BYTES = "bytes"
    MAX_RESULT_BYTES = "result_bytes"


OF_SHARD = frozenset({Setting.MAX_BYTES, Setting.MAX_RESULT_BYTES})


def setting_of(field: bytes) -> tuple[str, Setting] | None:
    """Return the tenant, or ``*``, and the setting that a field names; None if there is no such."""
    name, colon, tenant = stored_text(field).partition(":")
    if not is_text(field) or name not in set(Setting):
        return None
    setting = Setting(name)
    if (setting in OF_SHARD) is bool(colon) or bool(colon) is not bool(tenant):
        return None
    return tenant or EVERYONE, setting


def value_of(name: Setting, value: bytes) -> float | None:
    """Return the value of a setting, None if it has none that can be used.

    A weight is a decimal number from 0.1 to 100, any other a whole number from 0 to 2**53.
    """
    if name is Setting.WEIGHT:
        weight = float(value) if _DECIMAL.fullmatch(value) else 0.0
        return weight if MIN_WEIGHT <= weight <= MAX_WEIGHT else None
    number = stored_number(value) if value else None
    return number if number is not None and 0 <= number <= MAX_VALUE else None


def weights_of(settings: Mapping[bytes, bytes]) -> dict[str, float]:
    """Return the weights among settings, by tenant, ``*`` for all without their own."""
    found = ((setting_of(field), value) for field, value in settings.items())
    weights = {
        place[0]: value_of(Setting.WEIGHT, value)
        for place, value in found
        if place is not None and place[1] is Setting.WEIGHT
    }
    return {tenant: weight for tenant, weight in weights.items() if weight is not None}


def bad_settings(settings: Mapping[bytes, bytes]) -> list[str]:
    """Describe the settings of an unknown name or without a value that can be used."""
    return [
        f"{shown(field)} = {shown(value)}"
        for field, value in sorted(settings.items())
        if (place := setting_of(field)) is None or value_of(place[1], value) is None
    ]
