"""The chained block hash: one definition for producer, scheduler and worker.

A *block* is ``block_size`` consecutive tokens.  The hash of a full block covers its tokens and the
hash of the block before it, so equal hashes mean equal prefixes.  The chain has the semantics of
vLLM's ``sha256_cbor`` algorithm: ``h_i = sha256(cbor([h_{i-1}, tokens_i, extra_i]))`` in canonical
CBOR, with ``h_{-1} = sha256(cbor("vllm-none-hash"))``.
"""

from collections.abc import Sequence
from hashlib import sha256

from cbor2 import dumps

#: Parent of the first block.
ROOT_HASH = sha256(dumps("vllm-none-hash", canonical=True)).digest()

#: Tokens in one KV block of the hash chain unless a worker is told otherwise.
DEFAULT_BLOCK_SIZE = 16

#: Every so many blocks one hash is kept for routing, cut to so many bytes.
ROUTING_STRIDE = 4
ROUTING_HASH_BYTES = 8

ExtraKeys = tuple[tuple[str, str], ...]


def hash_block(parent: bytes, tokens: Sequence[int], extra: ExtraKeys | None = None) -> bytes:
    """Return the 32-byte hash of one full block given its parent's hash."""
    return sha256(dumps((parent, tuple(tokens), extra), canonical=True)).digest()


def hash_blocks(
    tokens: Sequence[int], block_size: int, extra: ExtraKeys | None = None
) -> list[bytes]:
    """Return the hashes of all *full* blocks of ``tokens``; ``extra`` enters the first one only."""
    hashes: list[bytes] = []
    parent = ROOT_HASH
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash_block(
            parent, tokens[start : start + block_size], extra if not start else None
        )
        hashes.append(parent)
    return hashes


def salt_keys(server_salt: bytes, cache_salt: str | None = None) -> ExtraKeys:
    """Return the extra keys that keep a tenant's prefixes to itself.

    ``server_salt`` is the tenant's random salt; a caller's ``cache_salt`` is appended, so it can
    only narrow who shares a prefix.
    """
    salt = server_salt.hex() if cache_salt is None else f"{server_salt.hex()}/{cache_salt}"
    return (("cache_salt", salt),)


def lora_keys(name: str, digest: str) -> ExtraKeys:
    """Return the extra keys of what was computed under a LoRA adapter; they go before the salt."""
    return ((f"lora:{name}", digest),)


def hint_hash(prefix_id: str, extra: ExtraKeys) -> bytes:
    """Return the routing hash that stands for a caller's name of a prefix.

    It goes before the hashes of the tokens; ``extra`` keeps the names of tenants apart.
    """
    named = dumps(("prefix_id", prefix_id, extra), canonical=True)
    return sha256(named).digest()[:ROUTING_HASH_BYTES]


def routing_key(hashes: Sequence[bytes]) -> bytes:
    """Return the job's sort key: the first 8 bytes of every 4th block hash, concatenated.

    Equal hashes at one depth imply equal hashes at all lower depths, so the lexicographic order of
    these keys is the depth-first order of the radix tree over all prompts.
    """
    kept = hashes[ROUTING_STRIDE - 1 :: ROUTING_STRIDE]
    return b"".join(digest[:ROUTING_HASH_BYTES] for digest in kept)
