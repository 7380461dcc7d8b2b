"""The block hash chain against vLLM's published vector and a by-hand CBOR encoding."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.prefix import (
    ROOT_HASH,
    hash_block,
    hash_blocks,
    routing_key,
    salt_keys,
)

TOKENS = st.lists(st.integers(0, 200_000), max_size=200)


def test_the_hash_of_a_block_equals_the_golden_vector_of_vllm() -> None:
    golden = "c49ab11fb576db6f376aef58c24f728a0ba1807e8cac5f940f1a5c4c20741898"
    assert golden == hash_blocks([0, 1, 2, 3], block_size=4)[0].hex()


def test_the_root_is_the_hash_of_a_hand_encoded_text_string() -> None:
    # CBOR: major type 3 (text), length 14.
    assert sha256(b"\x6evllm-none-hash").digest() == ROOT_HASH


def test_a_block_is_encoded_as_an_array_of_parent_tokens_and_extra_keys() -> None:
    # array(3), bytes(32), array(2) of 7 and 300, null.
    encoded = b"\x83\x58\x20" + ROOT_HASH + b"\x82\x07\x19\x01\x2c" + b"\xf6"
    assert sha256(encoded).digest() == hash_block(ROOT_HASH, [7, 300])


def test_only_full_blocks_are_hashed() -> None:
    assert hash_blocks([1, 2, 3], block_size=4) == []
    assert len(hash_blocks(list(range(11)), block_size=4)) == 2


def test_the_salt_changes_every_block_of_the_chain() -> None:
    tokens = list(range(12))
    plain = hash_blocks(tokens, 4)
    salted = hash_blocks(tokens, 4, salt_keys(b"\x01" * 16))
    narrowed = hash_blocks(tokens, 4, salt_keys(b"\x01" * 16, "mine"))
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain, salted, narrowed, strict=True))


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_chains_agree_exactly_as_far_as_the_full_blocks_do(
    left: list[int], right: list[int], block_size: int
) -> None:
    pairs = zip(hash_blocks(left, block_size), hash_blocks(right, block_size), strict=False)
    for index, (a, b) in enumerate(pairs):
        end = (index + 1) * block_size
        assert (a == b) == (left[:end] == right[:end])


@given(st.lists(TOKENS, max_size=12))
def test_routing_keys_sort_prompts_into_the_depth_first_order_of_their_prefix_tree(
    prompts: list[list[int]],
) -> None:
    """In sorted order, prompts that share a routing block are neighbours at every depth."""
    keys = sorted(routing_key(hash_blocks(p, 4)) for p in prompts)
    for depth in range(8, 80, 8):
        seen: list[bytes] = []
        for key in (k[:depth] for k in keys if len(k) >= depth):
            if not seen or seen[-1] != key:
                assert key not in seen
                seen.append(key)


def test_a_routing_key_keeps_eight_bytes_of_every_fourth_block() -> None:
    hashes = hash_blocks(list(range(16 * 9)), 16)
    assert hashes[3][:8] + hashes[7][:8] == routing_key(hashes)
