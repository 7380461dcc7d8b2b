"""Reading routing keys: chained hashes of 8 bytes, one after the other, the shallowest first."""

from collections.abc import Container

from tidemill.protocol.prefix import ROUTING_HASH_BYTES

Digests = Container[bytes]


def split_key(key: bytes, depth: int = 0) -> list[bytes]:
    """Return the hashes of ``key`` behind the first ``depth`` ones."""
    width = ROUTING_HASH_BYTES
    return [key[start : start + width] for start in range(depth * width, len(key), width)]


def hash_at(key: bytes, depth: int) -> bytes:
    """Return the hash that stands for the first ``depth`` hashes of ``key``, 1 being the first."""
    end = depth * ROUTING_HASH_BYTES
    return key[end - ROUTING_HASH_BYTES : end]


def shared_depth(one: bytes, other: bytes) -> int:
    """Return how many leading hashes two keys share.

    A binary search: the hashes are chained, so equal ones mean that all before them are equal.
    """
    low, high = 0, min(len(one), len(other)) // ROUTING_HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = (middle - 1) * ROUTING_HASH_BYTES, middle * ROUTING_HASH_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


def depth_within(key: bytes, one: Digests, other: Digests, near: int | None = None) -> int:
    """Return how many leading hashes of ``key`` are in one of two prefix-closed collections.

    Takes log2 of the key's depth in look-ups, or two where ``near`` is right already.
    """
    low, high = 0, len(key) // ROUTING_HASH_BYTES
    if near is not None and near <= high:
        end = near * ROUTING_HASH_BYTES
        here, beyond = key[end - ROUTING_HASH_BYTES : end], key[end : end + ROUTING_HASH_BYTES]
        if near and here not in one and here not in other:
            high = near - 1
        elif beyond not in one and beyond not in other:
            return near
        else:
            low = near + 1
    while low < high:
        middle = (low + high + 1) // 2
        digest = key[(middle - 1) * ROUTING_HASH_BYTES : middle * ROUTING_HASH_BYTES]
        if digest in one or digest in other:
            low = middle
        else:
            high = middle - 1
    return low
