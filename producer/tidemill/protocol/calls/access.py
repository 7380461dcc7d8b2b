"""Calls about API keys of the HTTP interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.calls.replies import text
from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may submit in a minute; None bounds nothing."""

    requests: int | None = None
    tokens: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Charged:
    """Whether something was taken from a key's buckets, and what is left in them.

    If not, ``wait_ms`` is how long ``lacking``, "requests" or "tokens", will lack.  What is left is
    None where there is no bound; tokens may be owed.
    """

    wait_ms: int
    lacking: str
    requests_left: int | None
    tokens_left: int | None

    @property
    def is_refused(self) -> bool:
        """Whether nothing was taken."""
        return bool(self.lacking)


def charge_key(
    keys: ShardKeys, *, key_id: str, limits: KeyLimits, requests: int = 0, tokens: int = 0
) -> Call[Charged]:
    """Take requests and tokens from a key's buckets, both or none; ``tokens`` < 0 come back."""
    bounds = ("" if bound is None else bound for bound in (limits.requests, limits.tokens))

    def charged(reply: Sequence[Any]) -> Charged:
        wait_ms, which, requests_left, tokens_left = reply
        return Charged(
            int(wait_ms),
            {"rpm": "requests", "tpm": "tokens"}.get(text(which), ""),
            None if limits.requests is None else int(requests_left),
            None if limits.tokens is None else int(tokens_left),
        )

    return Call("charge_key", (keys.key_bucket(key_id),), (*bounds, requests, tokens), charged)


def use_key(keys: ShardKeys, *, key_id: str) -> Call[bool]:
    """Keep when a key was used; false if it is gone."""
    return Call("use_key", (keys.api_keys, keys.api_key_uses), (key_id,), bool)
