# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Chunked prefill attention: blocks of query tokens of varying sequences, causal with context."""

import triton
import triton.language as tl

from tidemill_kernels.triton_tiles import attend_tile, initial_softmax, load_rows


@triton.jit
def find_sequence(cu_seqlens_ptr, query_block, num_decodes, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the sequence that owns a query block.

    Sequence s (the first prefill is `num_decodes`) owns the blocks from
    tokens_before(s) div BLOCK_Q + prefills_before(s) on. That leaves room for each sequence's
    partial block without the host knowing any length; a block may turn out empty.
    """
    low = num_decodes
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        tokens_before = tl.load(cu_seqlens_ptr + middle) - num_decodes
        if tokens_before // BLOCK_Q + middle - num_decodes <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_decodes", "num_seqs"])
def prefill_kernel(
    out_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_ptr,
    sinks_ptr,
    num_decodes,
    num_seqs,
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
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Grid (query blocks, KV heads). Rows are (token, head of the group), BLOCK_Q tokens a block.

    `qk_scale` carries log2(e).
    """
    # Late blocks see the most tokens; starting with them leaves no long tail.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(cu_seqlens_ptr, query_block, num_decodes, num_seqs, BLOCK_Q)
    start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - start
    first_block = (start - num_decodes) // BLOCK_Q + seq - num_decodes
    first_token = (query_block - first_block) * BLOCK_Q
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context = seq_len - query_len
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PADDED)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_ok = (tokens < query_len) & (rows < BLOCK_Q * GROUP)
    dim_ok = dims < HEAD_DIM
    token_rows = (start + tokens).to(tl.int64)
    query_rows = query_ptr + token_rows * stride_query_token + heads * stride_query_head
    query = load_rows(
        query_rows[:, None] + dims[None, :], row_ok, dim_ok, True, DIM_PADDED > HEAD_DIM
    )
    row_max, row_sum = initial_softmax(sinks_ptr, heads, row_ok, True, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    positions = context + tokens
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_head
    # Scales are [num_blocks, kv_heads, BLOCK_SIZE]; unused without a KV_FORMAT.
    key_scales = key_scales_ptr + kv_head * BLOCK_SIZE
    value_scales = value_scales_ptr + kv_head * BLOCK_SIZE
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    kv_len = context + tl.minimum(first_token + BLOCK_Q, query_len)
    # Every row sees the tokens before the block's first one; tiles of those need no mask.
    full = (context + first_token + 1) // TILE
    kv_start = 0
    first = 0
    if WINDOW > 0:
        kv_start = tl.maximum(context + first_token + 1 - WINDOW, 0)
        first = kv_start // TILE
        # Tiles in which the window of some row starts; from `lead` on every row sees it all.
        lead = tl.cdiv(tl.maximum(kv_len - WINDOW, 0), TILE)
        for tile in range(first, tl.minimum(lead, full)):
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
                kv_len,
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
        first = tl.maximum(first, tl.minimum(lead, full))
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
            kv_len,
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
    for tile in range(tl.maximum(first, full), tl.cdiv(kv_len, TILE)):
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
            kv_len,
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
    result = acc / row_sum[:, None]
    at = token_rows[:, None] * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
    ok = row_ok[:, None] & dim_ok[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=ok)
