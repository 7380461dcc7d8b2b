"""The two attention operations on a GPU: argument checks, then Triton launches, never a wait."""

import math
from functools import cache

import torch

from tidemill_kernels.checks import check_attention, check_cache_write
from tidemill_kernels.kv_scales import LARGEST, TINY, KVScales, as_bytes
from tidemill_kernels.metadata import AttentionMetadata
from tidemill_kernels.options import AttentionOptions
from tidemill_kernels.triton_cache import cache_write_kernel, quantising_write_kernel
from tidemill_kernels.triton_codes import KV_FORMATS
from tidemill_kernels.triton_decode import decode_kernel, reduce_kernel
from tidemill_kernels.triton_prefill import prefill_kernel
from tidemill_kernels.triton_tuning import (
    BLOCK_SIZES,
    MAX_HEAD_DIM,
    Geometry,
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
    scales: KVScales | None = None,
) -> None:
    """Store each token's key and value in its slot; arguments as in `reference`.

    Slots beyond the cache are not detected: the slots are on the device.
    """
    check_cache_write(key, value, key_cache, value_cache, slot_mapping, scales)
    _check_cache(key_cache)
    if not key.shape[0]:
        return
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    if scales is None:
        cache_write_kernel[(key.shape[0],)](
            *(key, value, key_cache, value_cache, slot_mapping),
            *(*strides, *key_cache.stride()[:3]),
            **_write_constants(key_cache),
        )
        return
    quantising_write_kernel[(key.shape[0],)](
        *(key, value, _codes(key_cache), _codes(value_cache), scales.keys, scales.values),
        *(slot_mapping, *strides, *key_cache.stride()[:3]),
        **_write_constants(key_cache),
        KV_FORMAT=KV_FORMATS[key_cache.dtype],
        LARGEST=LARGEST[key_cache.dtype],
        TINY=TINY,
    )


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> None:
    """Attend over the paged cache; arguments as in `reference`.

    Decodes of length 0 (padding rows of a CUDA graph) get zeros. Lengths and blocks that do not
    fit the cache are not detected: they are on the device.

    Raises:
        ValueError: shapes, dtypes or the block size do not fit.
    """
    options = AttentionOptions(window, soft_cap, sinks)
    check_attention(out, query, key_cache, value_cache, metadata, options, scales)
    _check_cache(key_cache)
    if out.dtype != query.dtype or (scales is None and query.dtype != key_cache.dtype):
        raise ValueError(f"out, query and cache must share a dtype, not {query.dtype} and others")
    tensors = (out, query, key_cache, value_cache)
    if metadata.num_decodes:
        num_splits = _num_splits(query, key_cache, metadata, options)
        decode(*tensors, metadata, scale, options, scales, num_splits=num_splits)
    if metadata.num_decodes < metadata.num_seqs:
        prefill(*tensors, metadata, scale, options, scales)


def decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    options: AttentionOptions,
    scales: KVScales | None = None,
    *,
    num_splits: int,
) -> None:
    """Write the rows of the decodes, each split into `num_splits` (a power of two) programs."""
    num_heads, kv_heads = query.shape[1], key_cache.shape[1]
    geometry = _geometry(query, key_cache)
    shape = decode_shape(geometry)
    dim_padded = geometry.dim_padded
    partials = _partials(metadata.num_decodes, num_heads, num_splits, dim_padded, query.device)
    decode_kernel[(metadata.num_decodes, kv_heads, num_splits)](
        *(out, *partials, query, *_cache_arguments(key_cache, value_cache, scales)),
        *(metadata.block_tables, metadata.seq_lens),
        *(_sinks_or(partials[1], options), scale * _LOG2_E),
        *_strides(out, query, key_cache, metadata),
        NUM_SPLITS=num_splits,
        **shape.constants(geometry),
        **_option_constants(options),
        KV_FORMAT=KV_FORMATS.get(key_cache.dtype, 0),
        **shape.options(),
    )
    if num_splits > 1:
        reduce_kernel[(metadata.num_decodes, num_heads)](
            *(out, *partials, *out.stride()[:2]),
            HEAD_DIM=geometry.head_dim,
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
    options: AttentionOptions,
    scales: KVScales | None = None,
) -> None:
    """Write the rows of the prefill chunks."""
    geometry = _geometry(query, key_cache)
    shape = prefill_shape(geometry)
    block_q = shape.block_m // geometry.group_size
    num_decodes, num_seqs = metadata.num_decodes, metadata.num_seqs
    # An upper bound that needs no lengths; programs past the last query block return at once.
    num_blocks = (query.shape[0] - num_decodes) // block_q + num_seqs - num_decodes
    prefill_kernel[(num_blocks, key_cache.shape[1])](
        *(out, query, *_cache_arguments(key_cache, value_cache, scales)),
        *(metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q),
        *(_sinks_or(out, options), num_decodes, num_seqs, scale * _LOG2_E),
        *_strides(out, query, key_cache, metadata),
        BLOCK_Q=block_q,
        **shape.constants(geometry),
        **_option_constants(options),
        KV_FORMAT=KV_FORMATS.get(key_cache.dtype, 0),
        **shape.options(),
    )


def _check_cache(key_cache: torch.Tensor) -> None:
    block_size, head_dim = key_cache.shape[2:]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size}: Triton kernels take {sorted(BLOCK_SIZES)}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: Triton kernels take {MAX_HEAD_DIM} at most")
    if key_cache.dtype not in (*_DTYPES, *KV_FORMATS):
        raise ValueError(f"cache is {key_cache.dtype}: Triton kernels take {_DTYPES}")


def _write_constants(key_cache: torch.Tensor) -> dict[str, int]:
    _, kv_heads, block_size, head_dim = key_cache.shape
    return {
        "KV_HEADS": kv_heads,
        "HEADS_PADDED": next_power_of_2(kv_heads),
        "HEAD_DIM": head_dim,
        "DIM_PADDED": padded_dim(head_dim),
        "BLOCK_SIZE": block_size,
    }


def _codes(cache: torch.Tensor) -> torch.Tensor:
    # Triton's own floats of 8 bits differ between GPUs.
    return cache if cache.dtype == torch.int8 else as_bytes(cache)


def _cache_arguments(
    key_cache: torch.Tensor, value_cache: torch.Tensor, scales: KVScales | None
) -> tuple[torch.Tensor, ...]:
    if scales is None:
        return key_cache, value_cache, key_cache, value_cache
    return _codes(key_cache), _codes(value_cache), scales.keys, scales.values


def _geometry(query: torch.Tensor, key_cache: torch.Tensor) -> Geometry:
    return Geometry(
        group_size=query.shape[1] // key_cache.shape[1],
        head_dim=key_cache.shape[3],
        # Codes are widened to the query's dtype before they are multiplied.
        element_size=query.element_size(),
        block_size=key_cache.shape[2],
        alignment=math.gcd(16, key_cache.stride(0), key_cache.stride(2)),
    )


def _sinks_or(unused: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    return unused if options.sinks is None else options.sinks


def _option_constants(options: AttentionOptions) -> dict[str, int | float | bool]:
    # Constants, because a model has one or two windows and caps; a window beyond 32 bits hides
    # nothing.
    return {
        "WINDOW": 0 if options.window >= 2**30 else options.window,
        "SOFT_CAP": float(options.soft_cap),
        "HAS_SINKS": options.sinks is not None,
    }


def _num_splits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> int:
    tile = decode_shape(_geometry(query, key_cache)).tile
    num_seen = min(metadata.max_seq_len, options.window or metadata.max_seq_len)
    max_tiles = -(-num_seen // tile)
    num_sms = _num_multiprocessors(query.device)
    return choose_num_splits(metadata.num_decodes, key_cache.shape[1], max_tiles, num_sms)


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
        key_cache.shape[1] * key_cache.shape[2],
    )
