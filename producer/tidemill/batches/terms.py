"""What callers say of files and batches, checked; pure."""

import re
from collections.abc import Mapping
from typing import Any

from tidemill.protocol.batches import (
    ENDPOINTS,
    MAX_WINDOW_SECONDS,
    MIN_WINDOW_SECONDS,
)
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.files import (
    DEFAULT_FILE_SECONDS,
    MAX_FILE_SECONDS,
    MAX_FILENAME_CHARS,
    MIN_FILE_SECONDS,
    Purpose,
)
from tidemill.protocol.ids import FILE_PREFIX, is_stored_id

_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def window_seconds(window: object) -> int:
    """Return how long a batch may take, such as ``24h``, ``90m`` or ``7d``."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match.group(1)) * _UNIT_SECONDS[match.group(2)] if match else 0
    if not MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        raise _wrong(
            "completion_window",
            f"{str(window)[:40]!r} is no time from 1m to 30d",
            "Write a number and s, m, h or d, such as 24h.",
        )
    return seconds


def checked_endpoint(endpoint: object) -> str:
    """Return an endpoint whose requests may be in a batch."""
    if endpoint not in ENDPOINTS:
        raise _wrong(
            "endpoint",
            f"{str(endpoint)[:80]!r} is not known",
            f"Use one of {', '.join(ENDPOINTS)}.",
        )
    return str(endpoint)


def checked_purpose(purpose: object) -> Purpose:
    """Return what a file is uploaded for."""
    uploaded = [known for known in Purpose if known is not Purpose.BATCH_OUTPUT]
    if purpose not in uploaded:
        raise _wrong(
            "purpose", f"{str(purpose)[:40]!r} is not known", f"Use one of {', '.join(uploaded)}."
        )
    return Purpose(str(purpose))


def checked_filename(filename: object) -> str:
    """Return the name that a file had where it comes from, without its folders."""
    name = filename if isinstance(filename, str) else ""
    name = name.replace("\\", "/").rpartition("/")[2]
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _wrong("file", "its name is no valid Unicode") from error
    return name[:MAX_FILENAME_CHARS] or "file"


def expiry_seconds(expires_after: object, field: str = "expires_after") -> int:
    """Return how long a file is kept: ``{"anchor": "created_at", "seconds": n}``, or 30 days."""
    return checked_expiry(expires_after, field) or DEFAULT_FILE_SECONDS


def checked_expiry(expires_after: object, field: str) -> int | None:
    """Return the seconds of ``expires_after``, None if it is not given."""
    if expires_after is None:
        return None
    if not isinstance(expires_after, Mapping) or expires_after.get("anchor") != "created_at":
        raise _wrong(f"{field}.anchor", "it is not created_at")
    seconds = _whole(expires_after.get("seconds"))
    if seconds is None or not MIN_FILE_SECONDS <= seconds <= MAX_FILE_SECONDS:
        raise _wrong(f"{field}.seconds", f"it is not from {MIN_FILE_SECONDS} to {MAX_FILE_SECONDS}")
    return seconds


def checked_limit(limit: object, default: int, most: int) -> int:
    """Return how many objects a page may have."""
    if limit is None:
        return default
    number = _whole(limit)
    if number is None or not 1 <= number <= most:
        raise _wrong("limit", f"it is not from 1 to {most}")
    return number


def checked_after(after: str | None, prefix: str) -> str:
    """Return the id of a file or a batch that a page is to follow, "" for none."""
    if after is None:
        return ""
    if not is_stored_id(after, prefix):
        kind = "file" if prefix == FILE_PREFIX else "batch"
        raise _wrong(
            "after",
            f"{str(after)[:64]!r} is not the id of a {kind}",
            "Use the last_id of the page before.",
        )
    return after


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16:
        return int(value)  # a form has text only
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _wrong(field: str, reason: str, fix: str = "") -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field=field, fix=fix)
