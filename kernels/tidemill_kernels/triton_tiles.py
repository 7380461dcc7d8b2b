# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# triton has no types, and its kernels take blocks that Python's types cannot describe.
"""Pieces that the attention kernels share: tile addresses, scores, and the online softmax.

Rules that keep the kernels right on triton 3.6 to 3.9, in the interpreter and on every GPU:
pointers and masks rather than block pointers; bfloat16 only as an operand of `tl.dot`, never in
arithmetic; an explicit `input_precision`, because float32 products would be TF32 otherwise.
"""

import triton
import triton.language as tl

from tidemill_kernels.triton_codes import decoded

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_offsets(
    table_ptr,
    tile,
    num_blocks,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return int64 [TILE]: where tile number `tile` of a sequence lies in a head of the cache."""
    if BLOCK_SIZE >= TILE:
        block = tl.load(table_ptr + (tile * TILE) // BLOCK_SIZE).to(tl.int64)
        slots = (tile * TILE) % BLOCK_SIZE + tl.arange(0, TILE)
        return block * stride_block + slots * stride_slot
    else:
        # One load an id, widened by reshape: a load per token would not vectorise.
        BLOCKS: tl.constexpr = TILE // BLOCK_SIZE
        index = tile * BLOCKS + tl.arange(0, BLOCKS)
        if MASKED:
            blocks = tl.load(table_ptr + index, mask=index < num_blocks, other=0)
        else:
            blocks = tl.load(table_ptr + index)
        slots = tl.arange(0, BLOCK_SIZE)
        offsets = blocks.to(tl.int64)[:, None] * stride_block + slots[None, :] * stride_slot
        return tl.multiple_of(tl.reshape(offsets, [TILE]), [ALIGN])


@triton.jit
def load_rows(ptrs, row_ok, dim_ok, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Load [rows, dims]; masks only what can lie outside, since masks cost registers."""
    if MASKED and PADDED:
        return tl.load(ptrs, mask=row_ok[:, None] & dim_ok[None, :], other=0)
    elif MASKED:
        return tl.load(ptrs, mask=row_ok[:, None], other=0)
    elif PADDED:
        return tl.load(ptrs, mask=dim_ok[None, :], other=0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_scales(ptrs, token_ok, MASKED: tl.constexpr):
    """Load float32 [rows]; 0 for tokens that are not there."""
    if MASKED:
        return tl.load(ptrs, mask=token_ok, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """Squeeze scores, in units of log2, into (-SOFT_CAP, SOFT_CAP) in natural units by a tanh."""
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), and exp(2 x) = exp2(2 scores / SOFT_CAP).
    squeezed = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / SOFT_CAP)))
    return squeezed * (SOFT_CAP * LOG2_E)


@triton.jit
def initial_softmax(
    sinks_ptr, heads, row_ok, counts_sink, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr
):
    """Return (row_max, row_sum) before any token: empty, or what a sink without a value leaves."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=row_ok, other=0.0) * LOG2_E
        row_max = tl.where(counts_sink, sinks, row_max)
        row_sum = tl.where(counts_sink, 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def attend_tile(
    acc,
    row_max,
    row_sum,
    query,
    positions,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    tile,
    kv_start,
    kv_len,
    qk_scale,
    stride_block,
    stride_slot,
    stride_scales,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return (acc, row_max, row_sum) after one more tile of keys and values.

    Those of a quantised cache, whose `KV_FORMAT` is not 0, are decoded to the query's dtype: the
    scales of keys multiply scores, which are float32 already, those of values each element.

    `row_max` is in units of log2. With `MASKED`, tokens from `kv_len` on are not read and each
    query row sees the tokens up to its own entry of `positions`; with a `WINDOW` besides, tokens
    before `kv_start` are not read either, and a row sees the last `WINDOW` tokens alone.
    """
    DIM: tl.constexpr = query.shape[1]
    dims = tl.arange(0, DIM)
    offsets = tile_offsets(
        table_ptr,
        tile,
        tl.cdiv(kv_len, BLOCK_SIZE),
        stride_block,
        stride_slot,
        BLOCK_SIZE,
        TILE,
        ALIGN,
        MASKED,
    )
    tokens = tile * TILE + tl.arange(0, TILE)
    at = offsets[:, None] + dims[None, :]
    token_ok = tokens < kv_len
    if WINDOW > 0:
        token_ok = token_ok & (tokens >= kv_start)
    dim_ok = dims < HEAD_DIM
    keys = load_rows(key_ptr + at, token_ok, dim_ok, MASKED, DIM > HEAD_DIM)
    if KV_FORMAT:
        keys = decoded(keys, KV_FORMAT).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee", out_dtype=tl.float32) * qk_scale
    if KV_FORMAT:
        scales_at = tile_offsets(
            table_ptr,
            tile,
            tl.cdiv(kv_len, BLOCK_SIZE),
            stride_scales,
            1,
            BLOCK_SIZE,
            TILE,
            1,
            MASKED,
        )
        scores *= load_scales(key_scales_ptr + scales_at, token_ok, MASKED)[None, :]
    if SOFT_CAP > 0.0:
        scores = soft_capped(scores, SOFT_CAP)
    if MASKED:
        visible = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max
    if MASKED and WINDOW > 0:
        # A row whose window starts after this tile has seen nothing yet.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    values = load_rows(value_ptr + at, token_ok, dim_ok, MASKED, DIM > HEAD_DIM)
    if KV_FORMAT:
        value_scales = load_scales(value_scales_ptr + scales_at, token_ok, MASKED)
        values = (decoded(values, KV_FORMAT) * value_scales[:, None]).to(query.dtype)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum
