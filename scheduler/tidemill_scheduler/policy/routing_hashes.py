"""Reading routing keys: chained hashes of 8 bytes, one after the other, the shallowest first."""

from collections.abc import Container

from tidemill.protocol.prefix import ROUTING_HASH_BYTES

Digests = Container[bytes]


def split_key(key: bytes) -> list[bytes]:
    """Return the hashes of ``key``."""
    width = ROUTING_HASH_BYTES
    return [key[start : start + width] for start in range(0, len(key), width)]


def prefix_of(key: bytes, depth: int) -> bytes:
    """Return the first ``depth`` hashes of ``key``."""
    return key[: depth * ROUTING_HASH_BYTES]


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


def depth_within(key: bytes, digests: Digests, least: int = 0, near: int | None = None) -> int:
    """Return how many leading hashes of ``key`` are in a prefix-closed collection.

    ``least`` are known to be of use anyway: the result is that at least.  Takes log2 of the key's
    depth in look-ups, or two where ``near`` is right already.
    """
    low, high = least, len(key) // ROUTING_HASH_BYTES
    # A step beyond the guess first: most guesses are still right.
    probes = [] if near is None else [near + 1, near]
    while low < high:
        middle = probes.pop() if probes else (low + high + 1) // 2
        if not low < middle <= high:
            continue
        if key[(middle - 1) * ROUTING_HASH_BYTES : middle * ROUTING_HASH_BYTES] in digests:
            low = middle
        else:
            high = middle - 1
    return low
