"""Bounded msgpack: every message on the wire is one version byte and one msgpack map."""

from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, ValidationError

from tidemill.protocol.complaints import complaint_of
from tidemill.protocol.errors import MalformedMessage, UnsupportedVersion

#: The highest wire version this process reads and the one it writes.
WIRE_VERSION = 1

#: Bounds on one message; a larger prompt belongs in a blob store, not in Redis.
MAX_MESSAGE_BYTES = 1 << 20
#: A stored result repeats a whole token log, so it may be as large as many messages.
MAX_RESULT_BYTES = 1 << 24
MAX_ARRAY_LEN = 1 << 18
MAX_MAP_LEN = 1024

M = TypeVar("M", bound=BaseModel)


def pack(value: Any) -> bytes:
    """Encode plain data as msgpack; raises ``MalformedMessage`` for what it cannot hold."""
    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except (ValueError, OverflowError) as error:
        # Half a surrogate pair, an integer of more than 64 bits, or too deep a nesting.
        raise MalformedMessage(f"cannot be written as msgpack: {type(error).__name__}") from error


def unpack(data: bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Decode msgpack within the bounds above; raises ``MalformedMessage``."""
    if len(data) > max_bytes:
        raise MalformedMessage(f"message has {len(data)} bytes, the limit is {max_bytes}")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_array_len=MAX_ARRAY_LEN,
            max_map_len=MAX_MAP_LEN,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"not a msgpack message: {type(error).__name__}") from error


def encode(message: BaseModel) -> bytes:
    """Encode a message: the version byte, then its fields without those at their default."""
    return bytes([WIRE_VERSION]) + pack(message.model_dump(mode="python", exclude_defaults=True))


def decode(data: bytes, model: type[M], *, max_bytes: int = MAX_MESSAGE_BYTES) -> M:
    """Decode ``data`` as ``model``; raises ``MalformedMessage`` or ``UnsupportedVersion``."""
    return as_message(decode_plain(data, max_bytes=max_bytes), model)


def decode_plain(data: bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Return a message's fields unchecked; raises ``MalformedMessage``, ``UnsupportedVersion``."""
    if not data:
        raise MalformedMessage("empty message")
    if data[0] != WIRE_VERSION:
        raise UnsupportedVersion(
            f"message has version {data[0]}, this process reads {WIRE_VERSION}",
            fix="Upgrade this process before the one that sent the message.",
        )
    return unpack(data[1:], max_bytes=max_bytes)


def as_message(fields: Any, model: type[M]) -> M:
    """Check the fields of a message; raises ``MalformedMessage``."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise MalformedMessage(f"{model.__name__}: {_first_problem(error)}") from error


def _first_problem(error: ValidationError) -> str:
    # Without the values: they may be a tenant's.
    field, reason = complaint_of(error.errors(include_url=False), show=False)
    return f"{field}: {reason}"
