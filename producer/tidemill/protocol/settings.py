"""What operators set for tenants and shards, and which of it nobody can use."""

from collections.abc import Mapping
from enum import StrEnum

from tidemill.protocol.stored import is_text, shown, stored_number, stored_text

#: Stands for every tenant without a setting of its own.
EVERYONE = "*"

#: Lua counts exactly up to here.
MAX_VALUE = 2**53


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


def setting_of(field: bytes) -> tuple[str, Setting] | None:
    """Return the tenant, or ``*``, and the setting that a field names; None if there is no such."""
    name, colon, tenant = stored_text(field).partition(":")
    if not is_text(field) or name not in set(Setting):
        return None
    setting = Setting(name)
    if (setting in OF_SHARD) is bool(colon) or bool(colon) is not bool(tenant):
        return None
    return tenant or EVERYONE, setting


def value_of(value: bytes) -> int | None:
    """Return the value of a setting; None if it is no whole number from 0 to 2**53."""
    number = stored_number(value) if value else None
    return number if number is not None and 0 <= number <= MAX_VALUE else None


def bad_settings(settings: Mapping[bytes, bytes]) -> list[str]:
    """Describe the settings of an unknown name or without a value that can be used."""
    return [
        f"{shown(field)} = {shown(value)}"
        for field, value in sorted(settings.items())
        if setting_of(field) is None or value_of(value) is None
    ]
