# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Cache write: new keys and values into their slots."""

import triton
import triton.language as tl


@triton.jit
def cache_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_head,
    stride_slot,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (tokens,): one program copies every head of a token, unless its slot is below 0."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    ok = (heads < KV_HEADS) & (dims < HEAD_DIM)
    key_at = token * stride_key_token + heads * stride_key_head + dims
    value_at = token * stride_value_token + heads * stride_value_head + dims
    slot_at = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    at = slot_at + heads.to(tl.int64) * stride_head + dims
    tl.store(key_cache_ptr + at, tl.load(key_ptr + key_at, mask=ok), mask=ok)
    tl.store(value_cache_ptr + at, tl.load(value_ptr + value_at, mask=ok), mask=ok)
