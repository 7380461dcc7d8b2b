# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Cache write: new keys and values into their slots."""

import triton
import triton.language as tl

from tidemill_kernels.triton_codes import encoded


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


@triton.jit
def quantising_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
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
    KV_FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
):
    """Grid (tokens,): as `cache_write_kernel`, to codes and scales; see `quantise_rows`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS_PADDED)
    dims = tl.arange(0, DIM_PADDED)[None, :]
    head_ok = heads < KV_HEADS
    ok = head_ok[:, None] & (dims < HEAD_DIM)
    block = slot // BLOCK_SIZE
    slot_at = block * stride_block + (slot % BLOCK_SIZE) * stride_slot
    at = slot_at + heads[:, None].to(tl.int64) * stride_head + dims
    scale_at = (block * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    key_at = token * stride_key_token + heads[:, None] * stride_key_head + dims
    keys = tl.load(key_ptr + key_at, mask=ok, other=0.0).to(tl.float32)
    codes, scales = quantised(keys, KV_FORMAT, LARGEST, TINY)
    tl.store(key_cache_ptr + at, codes, mask=ok)
    tl.store(key_scales_ptr + scale_at, scales, mask=head_ok)
    value_at = token * stride_value_token + heads[:, None] * stride_value_head + dims
    values = tl.load(value_ptr + value_at, mask=ok, other=0.0).to(tl.float32)
    codes, scales = quantised(values, KV_FORMAT, LARGEST, TINY)
    tl.store(value_cache_ptr + at, codes, mask=ok)
    tl.store(value_scales_ptr + scale_at, scales, mask=head_ok)


@triton.jit
def quantised(rows, KV_FORMAT: tl.constexpr, LARGEST: tl.constexpr, TINY: tl.constexpr):
    """Return codes and scales of float32 rows, by the rules of `quantise_rows`."""
    # Sizes of floats are ordered as their bits, and so a NaN is not lost in the maximum.
    bits = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = bits.to(tl.float32, bitcast=True)
    # Divisions as IEEE 754 has them: a plain one is approximate on GPUs.
    scales = tl.where(largest < TINY, 0.0, tl.div_rn(largest, LARGEST))
    finite = bits < 0x7F800000
    divisors = tl.where(finite & (scales > 0.0), scales, 1.0)
    numbers = tl.div_rn(rows, tl.broadcast_to(divisors[:, None], rows.shape))
    codes = encoded(tl.where(finite[:, None], numbers, 0.0), KV_FORMAT)
    return codes, tl.where(finite, scales, float("nan"))
