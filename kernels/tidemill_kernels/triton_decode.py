# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Decode attention: one query token a sequence, its cache split among programs, then a reduce.

Split-KV as in Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); the query heads of one KV head
are the rows of one matrix product.
"""

import triton
import triton.language as tl

from tidemill_kernels.triton_tiles import attend_tile, initial_softmax, load_rows


@triton.jit
def decode_kernel(
    out_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    sinks_ptr,
    qk_scale,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_table,
    stride_block,
    stride_head,
    stride_slot,
    stride_scales,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Grid (sequences, KV heads, splits). `qk_scale` carries log2(e).

    With one split the result goes to out; with more, the unnormalised rows go to partial_ptr,
    [sequences, heads, splits, DIM_PADDED], and their softmax states to the other two partials.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PADDED)
    heads = kv_head * GROUP + rows
    row_ok = rows < GROUP
    dim_ok = dims < HEAD_DIM
    query_rows = query_ptr + seq * stride_query_token + heads * stride_query_head
    query = load_rows(
        query_rows[:, None] + dims[None, :], row_ok, dim_ok, True, DIM_PADDED > HEAD_DIM
    )
    # A sink is counted once, in the first split.
    row_max, row_sum = initial_softmax(sinks_ptr, heads, row_ok, split == 0, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    positions = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_head
    # Scales are [num_blocks, kv_heads, BLOCK_SIZE]; unused without a KV_FORMAT.
    key_scales = key_scales_ptr + kv_head * BLOCK_SIZE
    value_scales = value_scales_ptr + kv_head * BLOCK_SIZE
    table_ptr = block_tables_ptr + seq * stride_table
    num_tiles = tl.cdiv(seq_len, TILE)
    kv_start = 0
    first_tile = 0
    if WINDOW > 0:
        kv_start = tl.maximum(seq_len - WINDOW, 0)
        first_tile = kv_start // TILE
    tiles_per_split = tl.cdiv(num_tiles - first_tile, NUM_SPLITS)
    first = first_tile + split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    if WINDOW > 0:
        # The tile in which the window starts is masked as well.
        lead = tl.minimum(tl.maximum(tl.cdiv(kv_start, TILE), first), last)
        for tile in range(first, lead):
            acc, row_max, row_sum = attend_tile(
                acc,
                row_max,
                row_sum,
                query,
                positions,
                key_ptr,
                value_ptr,
                key_scales,
                value_scales,
                table_ptr,
                tile,
                kv_start,
                seq_len,
                qk_scale,
                stride_block,
                stride_slot,
                stride_scales,
                HEAD_DIM,
                BLOCK_SIZE,
                TILE,
                ALIGN,
                WINDOW,
                SOFT_CAP,
                KV_FORMAT,
                MASKED=True,
            )
        first = tl.maximum(first, lead)
    # [first, full) needs no mask; what is left is at most one tile that ends the sequence.
    full = tl.minimum(last, seq_len // TILE)
    for tile in range(first, full):
        acc, row_max, row_sum = attend_tile(
            acc,
            row_max,
            row_sum,
            query,
            positions,
            key_ptr,
            value_ptr,
            key_scales,
            value_scales,
            table_ptr,
            tile,
            kv_start,
            seq_len,
            qk_scale,
            stride_block,
            stride_slot,
            stride_scales,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE,
            ALIGN,
            WINDOW,
            SOFT_CAP,
            KV_FORMAT,
            MASKED=False,
        )
    # A loop, not an if: loops are pipelined, which needs far fewer registers here.
    for tile in range(tl.maximum(first, full), last):
        acc, row_max, row_sum = attend_tile(
            acc,
            row_max,
            row_sum,
            query,
            positions,
            key_ptr,
            value_ptr,
            key_scales,
            value_scales,
            table_ptr,
            tile,
            kv_start,
            seq_len,
            qk_scale,
            stride_block,
            stride_slot,
            stride_scales,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE,
            ALIGN,
            WINDOW,
            SOFT_CAP,
            KV_FORMAT,
            MASKED=True,
        )
    if NUM_SPLITS > 1:
        num_heads = tl.num_programs(1) * GROUP
        part = (seq * num_heads + heads) * NUM_SPLITS + split
        tl.store(partial_max_ptr + part, row_max, mask=row_ok)
        tl.store(partial_sum_ptr + part, row_sum, mask=row_ok)
        at = part[:, None] * DIM_PADDED + dims[None, :]
        tl.store(partial_ptr + at, acc, mask=row_ok[:, None])
    else:
        # A padding row of a CUDA graph has length 0: its sum is 0 and its output 0.
        result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        at = seq * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
        ok = row_ok[:, None] & dim_ok[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def reduce_kernel(
    out_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Grid (sequences, heads): merge the splits of one row. NUM_SPLITS is a power of two."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    part = (seq * tl.num_programs(1) + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    split_max = tl.load(partial_max_ptr + part)
    split_sum = tl.load(partial_sum_ptr + part)
    row_max = tl.max(split_max, 0)
    # Splits beyond a short sequence hold -inf; a padding row holds nothing else.
    weights = tl.exp2(split_max - tl.where(row_max == float("-inf"), 0.0, row_max))
    row_sum = tl.sum(split_sum * weights, 0)
    rows = tl.load(partial_ptr + part[:, None] * DIM_PADDED + dims[None, :])
    result = tl.sum(rows * weights[:, None], 0) / tl.where(row_sum == 0.0, 1.0, row_sum)
    at = seq * stride_out_token + head * stride_out_head + dims
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
