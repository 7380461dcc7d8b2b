"""Signatures as the Standard Webhooks specification has them (version v1: HMAC-SHA256)."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable

from tidemill.protocol.errors import InvalidRequest

SECRET_PREFIX = "whsec_"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
_NEW_SECRET_BYTES = 32


def new_secret() -> str:
    """Return a random secret as receivers are given it: ``whsec_`` and base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_NEW_SECRET_BYTES)).decode()


def check_secret(secret: str) -> str:
    """Return ``secret`` if it is one; raises ``InvalidRequest``, which does not show it."""
    _key(secret)
    return secret


def signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    """Return ``v1,`` and the base64 of HMAC-SHA256 over ``<id>.<timestamp>.<body>``."""
    signed = f"{event_id}.{timestamp}.".encode() + body
    digest = hmac.new(_key(secret), signed, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def signed_headers(
    active: Iterable[str], event_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the three headers of one attempt; ``timestamp`` is its Unix time in seconds.

    There is one signature for each secret, so that a receiver may have any of them during a
    rotation.
    """
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signature(s, event_id, timestamp, body) for s in active),
    }


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad_secret() from error
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise _bad_secret()
    return key


def _bad_secret() -> InvalidRequest:
    return InvalidRequest(
        f"secret: it is not {SECRET_PREFIX} and the base64 of {MIN_SECRET_BYTES} to"
        f" {MAX_SECRET_BYTES} bytes",
        field="secret",
        fix="Leave it out: a good one is made.",
    )
