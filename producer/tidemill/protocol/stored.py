"""Numbers and names as they stand in Redis, where anybody may have left something else."""

import re
from collections.abc import Iterable, Mapping

from tidemill.protocol.errors import MalformedMessage

_WHOLE = re.compile(rb"-?[0-9]{1,18}")


def stored_text(value: bytes | None) -> str:
    """Return a name for people; what is no UTF-8 is replaced."""
    return (value or b"").decode("utf-8", "replace")


def stored_number(value: bytes | None) -> int | None:
    """Return a whole number, 0 if nothing is there; None if something else is."""
    if not value:
        return 0
    return int(value) if _WHOLE.fullmatch(value) else None


def stored_numbers(fields: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return the numbers of a hash; fields that hold something else are left out."""
    found = {stored_text(name): stored_number(value) for name, value in fields.items()}
    return {name: number for name, number in found.items() if number is not None}


def damaged_fields(fields: Mapping[bytes, bytes]) -> list[str]:
    """Describe the fields of a hash of numbers whose name or value cannot be read."""
    return [
        f"{shown(name)} = {shown(value)}"
        for name, value in sorted(fields.items())
        if stored_number(value) is None or not is_text(name)
    ]


def damaged_names(names: Iterable[bytes]) -> list[str]:
    """Describe the names that are no UTF-8."""
    return [shown(name) for name in names if not is_text(name)]


def is_text(value: bytes) -> bool:
    """Whether these bytes are UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def shown(value: bytes) -> str:
    """Return the start of any bytes, quoted as redis-cli quotes them if they are no text."""
    told = value[:40].decode("utf-8", "backslashreplace") + ("..." if len(value) > 40 else "")
    return f'"{told}"'


def require_number(field: str, value: bytes | None) -> int:
    """Return a whole number, 0 if nothing is there; raises ``MalformedMessage``."""
    number = stored_number(value)
    if number is None:
        raise MalformedMessage(
            f"{field}: {shown(value or b'')} is no whole number",
            fix="See what has written to Tidemill's keys; `tidemill doctor` looks for more of it.",
        )
    return number


def require_text(field: str, value: bytes | None) -> str:
    """Return a text, empty if nothing is there; raises ``MalformedMessage``."""
    if value and not is_text(value):
        raise MalformedMessage(
            f"{field}: {shown(value)} is no UTF-8",
            fix="See what has written to Tidemill's keys; `tidemill doctor` looks for more of it.",
        )
    return stored_text(value)
