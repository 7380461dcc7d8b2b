"""The two attention operations on a GPU: argument checks, then Triton launches, never a wait."""

import math
from functools import cache

import torch
import triton

from tidemill_kernels.checks import check_attention, check_cache_write
from tidemill_kernels.metadata import AttentionMetadata
from tidemill_kernels.triton_cache import cache_write_kernel
from tidemill_kernels.triton_decode import decode_kernel, reduce_kernel
from tidemill_kernels.triton_prefill import prefill_kernel
from tidemill_kernels.triton_tuning import (
    BLOCK_SIZES,
    MAX_HEAD_DIM,
    choose_num_splits,
    decode_shape,
    next_power_of_2,
    padded_dim,
    prefill_shape,
)

_LOG2_E = 1.0 / math.log(2.0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store each token's key and value in its slot; arguments as in `reference`.

    Slots beyond the cache are not detected: the slots are on the device.
    """
    check_cache_write(key, value, key_cache, value_cache, slot_mapping)
    _check_cache(key_cache)
    if not key.shape[0]:
        return
    _, kv_heads, block_size, head_dim = key_cache.shape
    cache_write_kernel[(key.shape[0],)](
        *(key, value, key_cache, value_cache, slot_mapping),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *key_cache.stride()[:3],
        KV_HEADS=kv_heads,
        HEADS_PADDED=next_power_of_2(kv_heads),
        HEAD_DIM=head_dim,
        DIM_PADDED=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
    )


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """Attend over the paged cache; arguments as in `reference`.

    Decodes of length 0 (padding rows of a CUDA graph) get zeros. Lengths and blocks that do not
    fit the cache are not detected: they are on the device.

    Raises:
        ValueError: shapes, dtypes or the block size do not fit.
    """
    check_attention(out, query, key_cache, value_cache, metadata)
    _check_cache(key_cache)
    if not out.dtype == query.dtype == key_cache.dtype:
        raise ValueError(f"out, query and cache must share a dtype, not {query.dtype} and others")
    if metadata.num_decodes:
        num_splits = _num_splits(query, key_cache, metadata)
        decode(out, query, key_cache, value_cache, metadata, scale, num_splits=num_splits)
    if metadata.num_decodes < metadata.num_seqs:
        prefill(out, query, key_cache, value_cache, metadata, scale)


def decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    num_splits: int,
) -> None:
    """Write the rows of the decodes, each split into `num_splits` (a power of two) programs."""
    num_heads, head_dim = query.shape[1:]
    kv_heads, block_size = key_cache.shape[1:3]
    shape = decode_shape(num_heads // kv_heads, head_dim, query.element_size())
    dim_padded = padded_dim(head_dim)
    partials = _partials(metadata.num_decodes, num_heads, num_splits, dim_padded, query.device)
    decode_kernel[(metadata.num_decodes, kv_heads, num_splits)](
        *(out, *partials, query, key_cache, value_cache),
        *(metadata.block_tables, metadata.seq_lens, scale * _LOG2_E),
        *_strides(out, query, key_cache, metadata),
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        BLOCK_M=shape.block_m,
        TILE=shape.tile,
        NUM_SPLITS=num_splits,
        ALIGN=_alignment(key_cache),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if num_splits > 1:
        reduce_kernel[(metadata.num_decodes, num_heads)](
            *(out, *partials, *out.stride()[:2]),
            HEAD_DIM=head_dim,
            DIM_PADDED=dim_padded,
            NUM_SPLITS=num_splits,
        )


def prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """Write the rows of the prefill chunks."""
    num_tokens, num_heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    group_size = num_heads // kv_heads
    shape = prefill_shape(group_size, head_dim, query.element_size())
    block_q = shape.block_m // group_size
    num_decodes, num_seqs = metadata.num_decodes, metadata.num_seqs
    # An upper bound that needs no lengths; programs past the last query block return at once.
    num_blocks = (num_tokens - num_decodes) // block_q + num_seqs - num_decodes
    prefill_kernel[(num_blocks, kv_heads)](
        *(out, query, key_cache, value_cache),
        *(metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q),
        *(num_decodes, num_seqs, scale * _LOG2_E),
        *_strides(out, query, key_cache, metadata),
        GROUP=group_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=shape.block_m,
        BLOCK_Q=block_q,
        TILE=shape.tile,
        ALIGN=_alignment(key_cache),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def _check_cache(key_cache: torch.Tensor) -> None:
    block_size, head_dim = key_cache.shape[2:]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size}: Triton kernels take {sorted(BLOCK_SIZES)}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: Triton kernels take {MAX_HEAD_DIM} at most")
    if key_cache.dtype not in _DTYPES:
        raise ValueError(f"cache is {key_cache.dtype}: Triton kernels take float32, 16-bit floats")


def _num_splits(query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata) -> int:
    num_heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[1]
    tile = decode_shape(num_heads // kv_heads, head_dim, query.element_size()).tile
    max_tiles = triton.cdiv(metadata.max_seq_len, tile)
    num_sms = _num_multiprocessors(query.device)
    return choose_num_splits(metadata.num_decodes, kv_heads, max_tiles, num_sms)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _partials(
    num_seqs: int, num_heads: int, num_splits: int, dim_padded: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Unused with one split, but a kernel argument all the same.
    rows = (num_seqs, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    acc = torch.empty((*rows, dim_padded), dtype=torch.float32, device=device)
    return acc, acc.new_empty(rows), acc.new_empty(rows)


def _strides(
    out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, metadata: AttentionMetadata
) -> tuple[int, ...]:
    return (
        *out.stride()[:2],
        *query.stride()[:2],
        metadata.block_tables.stride(0),
        *key_cache.stride()[:3],
    )


def _alignment(key_cache: torch.Tensor) -> int:
    # The power of two, 16 at most, that divides the offset of every cached token.
    return math.gcd(16, key_cache.stride(0), key_cache.stride(2))
