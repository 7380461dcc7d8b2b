"""When a job may and must run, as callers say it: in seconds and datetimes."""

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from pydantic import ValidationError

from tidemill._checks import shown
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import (
    DEFAULT_RETRIES,
    MAX_DURATION_MS,
    MAX_RETRIES,
    MAX_TIME_MS,
    JobTerms,
    invalid_request,
)
from tidemill.protocol.values import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    check_http_url,
)

MAX_SECONDS = MAX_DURATION_MS // 1000

#: Option -> field of ``JobTerms``, for the options that are a number of seconds.
_SECONDS = {
    "delay": "delay_ms",
    "deadline": "deadline_ms",
    "max_queue": "max_queue_ms",
    "stall_timeout": "stall_ms",
}


class TermOptions(TypedDict, total=False):
    """When a job may and must run, and how often it is tried.

    ``delay`` and ``at`` hold it back: for so many seconds, until a time with a time zone; the later
    one counts.  Then it must end within ``deadline`` seconds of its submission, get its first
    worker within ``max_queue`` seconds of the moment it may run, and its next token within
    ``stall_timeout`` seconds while it runs; otherwise it expires.  After an error that may pass it
    is tried again, ``max_retries`` times at most.  ``batch`` names jobs that are counted and
    cancelled together.  ``callback_url`` gets a signed webhook once the job has ended.
    ``metadata``, 16 short texts by name at most, is kept with the job and told with its status and
    its webhooks.
    """

    delay: float | None
    at: datetime | None
    deadline: float | None
    max_queue: float | None
    stall_timeout: float | None
    max_retries: int | None
    batch: str | None
    callback_url: str | None
    metadata: Mapping[str, str] | None


def take_terms(options: dict[str, Any]) -> JobTerms:
    """Take the options of ``TermOptions`` out of ``options``; raises ``InvalidRequest``."""
    given = {name: options.pop(name, None) for name in TermOptions.__annotations__}
    fields: dict[str, Any] = {
        field: _milliseconds(name, given[name], least=0 if name == "delay" else 1)
        for name, field in _SECONDS.items()
    }
    try:
        terms = JobTerms(
            **fields,
            not_before_ms=_unix_ms(given["at"]),
            max_retries=_retries(given["max_retries"]),
            batch=_batch(given["batch"]),
            callback_url=checked_callback(given["callback_url"]),
            metadata=checked_metadata(given["metadata"]),
        )
    except ValidationError as error:
        # Each for itself is right, so it is the deadline that comes before the job may run.
        told = invalid_request(error).message.removeprefix("request: deadline ")
        raise InvalidRequest(f"deadline: {told}", field="deadline") from error
    _check_start(terms, time.time_ns() // 1_000_000)
    return terms


def check_batch(name: object) -> str:
    """Return ``name`` if it may name a batch; raises ``InvalidRequest``."""
    if not isinstance(name, str):
        raise _bad_batch(name)
    try:
        checked = JobTerms.model_validate({"batch": name}).batch
    except ValidationError as error:
        raise _bad_batch(name) from error
    if not checked:
        raise _bad_batch(name)
    return checked


def checked_metadata(metadata: object) -> dict[str, str]:
    """Return what a caller wants to be kept, empty for None; raises ``InvalidRequest``."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or len(metadata) > MAX_METADATA:
        raise _bad_metadata(f"it is not an object of at most {MAX_METADATA} pairs")
    for name, value in metadata.items():
        if not _is_text(name, MAX_METADATA_KEY_CHARS) or not name:
            raise _bad_metadata(f"a key is a text of 1 to {MAX_METADATA_KEY_CHARS} characters")
        if not _is_text(value, MAX_METADATA_VALUE_CHARS):
            raise _bad_metadata(
                f"{name!r} is no text of at most {MAX_METADATA_VALUE_CHARS} characters"
            )
    return dict(metadata)


def _is_text(value: object, max_chars: int) -> bool:
    if not isinstance(value, str) or len(value) > max_chars:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad_metadata(reason: str) -> InvalidRequest:
    return InvalidRequest(f"metadata: {reason}", field="metadata")


def _check_start(terms: JobTerms, now_ms: int) -> None:
    if 0 < terms.deadline_ms <= terms.not_before_ms - now_ms:
        raise InvalidRequest(
            f"deadline: {terms.deadline_ms} ms from now is not after the time it may run at,"
            f" {terms.not_before_ms - now_ms} ms from now",
            field="deadline",
            fix="It counts from the submission: make it longer, or at earlier.",
        )


def _milliseconds(name: str, seconds: object, *, least: int) -> int:
    if seconds is None:
        return 0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidRequest(
            f"{name}: {type(seconds).__name__} is not a number of seconds", field=name
        )
    if not least <= seconds * 1000 <= MAX_DURATION_MS:
        raise InvalidRequest(
            f"{name}: {_number(seconds)} s is not between {least / 1000:g}"
            f" and {MAX_SECONDS} s (30 days)",
            field=name,
            fix="" if seconds > 0 else "Leave it out for no limit.",
        )
    return math.ceil(seconds * 1000)


def _number(seconds: float) -> str:
    return f"{seconds:g}" if isinstance(seconds, float) else shown(seconds)


def _unix_ms(at: object) -> int:
    if at is None:
        return 0
    if not isinstance(at, datetime) or at.tzinfo is None:
        kind = "a datetime without a time zone" if isinstance(at, datetime) else type(at).__name__
        raise InvalidRequest(
            f"at: {kind} does not say when",
            field="at",
            fix="Give a datetime with one, such as datetime.now(UTC) + timedelta(hours=1).",
        )
    unix_ms = math.ceil(at.timestamp() * 1000)
    if unix_ms > MAX_TIME_MS:
        raise InvalidRequest(f"at: {at.isoformat()} is after the year 2255", field="at")
    return max(0, unix_ms)


def _retries(retries: object) -> int:
    if retries is None:
        return DEFAULT_RETRIES
    is_number = isinstance(retries, int) and not isinstance(retries, bool)
    if not is_number or not 0 <= retries <= MAX_RETRIES:  # type: ignore[operator]  # a number
        raise InvalidRequest(
            f"max_retries: {shown(retries)} is not between 0 and {MAX_RETRIES}",
            field="max_retries",
        )
    return retries  # type: ignore[return-value]  # a number


def _batch(name: object) -> str:
    return "" if name is None else check_batch(name)


def checked_callback(url: object) -> str:
    """Return the address that is told of an end, empty for None; raises ``InvalidRequest``."""
    if url is None:
        return ""
    if not isinstance(url, str):
        raise InvalidRequest(
            f"callback_url: {type(url).__name__} is not an address", field="callback_url"
        )
    try:
        return check_http_url(url)
    except ValueError as error:
        raise InvalidRequest(
            f"callback_url: {error}",
            field="callback_url",
            fix="Give one such as https://example.com/hooks.",
        ) from error


def _bad_batch(name: object) -> InvalidRequest:
    return InvalidRequest(
        f"batch: {shown(name)!r} is not a name of a batch",
        field="batch",
        fix="Use 1 to 128 letters, digits, dots, dashes and underscores.",
    )
