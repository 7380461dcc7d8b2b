"""Reading routing keys: chained hashes of 8 bytes, one after the other, the shallowest first."""

from collections.abc import Container

from tidemill.protocol.prefix import ROUTING_HASH_BYTES

Digests = Container[bytes]

#: Tokens from which on a shared prefix makes a group that is kept on one worker.
GROUP_TOKENS = 128


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


def shared_depth(left: bytes, right: bytes, guess: int = 0) -> int:
    """Return how many leading routing hashes two keys share; a good ``guess`` makes it faster.

    Equal hashes at one depth imply equal hashes below, hence the binary search.
    """
    low, high = 0, min(len(left), len(right)) // ROUTING_HASH_BYTES
    if 0 < guess <= high:
        if not share_depth(left, right, guess):
            high = guess - 1
        elif not share_depth(left, right, guess + 1):
            return guess
        else:
            low = guess + 1
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * ROUTING_HASH_BYTES
        if left[end - ROUTING_HASH_BYTES : end] == right[end - ROUTING_HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


def share_depth(left: bytes, right: bytes, depth: int) -> bool:
    """Whether two keys share so many leading hashes, which is one or more."""
    end = depth * ROUTING_HASH_BYTES
    last = left[end - ROUTING_HASH_BYTES : end]
    return len(last) == ROUTING_HASH_BYTES and last == right[end - ROUTING_HASH_BYTES : end]


def group_depth(tokens_per_hash: int) -> int:
    """Return how many routing hashes two jobs of one group share at least."""
    return max(1, -(-GROUP_TOKENS // tokens_per_hash))


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
