"""Calls about API keys of the HTTP interface."""

from tidemill.protocol.functions import Call
from tidemill.protocol.keys import ShardKeys


def charge_key(keys: ShardKeys, *, key_id: str, per_minute: int) -> Call[int]:
    """Take one request from a key's bucket; 0, or how many ms to wait for it."""
    return Call("charge_key", (keys.key_bucket(key_id),), (per_minute,), int)


def use_key(keys: ShardKeys, *, key_id: str) -> Call[bool]:
    """Keep when a key was used; false if it is gone."""
    return Call("use_key", (keys.api_keys, keys.api_key_uses), (key_id,), bool)
