"""Shape checks shared by every implementation; they read no tensor data, so they never wait."""

import torch

from tidemill_kernels.kv_scales import LARGEST, KVScales
from tidemill_kernels.metadata import AttentionMetadata
from tidemill_kernels.options import AttentionOptions


def check_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Raise ValueError unless the arguments of `reshape_and_cache` fit together."""
    _check_caches(key_cache, value_cache)
    _check_scales(scales, key_cache)
    _, kv_heads, _, head_dim = key_cache.shape
    expected = (slot_mapping.shape[0], kv_heads, head_dim)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != expected:
            raise ValueError(f"{name} must be {expected}, not {tuple(tensor.shape)}")
        if tensor.dtype != key_cache.dtype and scales is None:
            raise ValueError(f"{name} is {tensor.dtype}, the cache is {key_cache.dtype}")
        _check_rows(name, tensor)
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype}, value is {value.dtype}")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping must be contiguous int64")


def check_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    scales: KVScales | None = None,
) -> None:
    """Raise ValueError unless the arguments of `paged_attention` fit together."""
    _check_caches(key_cache, value_cache)
    _check_scales(scales, key_cache)
    if query.dim() != 3 or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"query must be [tokens, heads, {key_cache.shape[3]}]")
    if out.shape != query.shape:
        raise ValueError(f"out must be {tuple(query.shape)} like query, not {tuple(out.shape)}")
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(f"{query.shape[1]} heads do not divide into {key_cache.shape[1]} KV heads")
    for name, tensor in (("out", out), ("query", query)):
        _check_rows(name, tensor)
    if metadata.block_tables.device != query.device:
        raise ValueError(f"metadata is on {metadata.block_tables.device}, query on {query.device}")
    _check_sinks(options.sinks, query)


def _check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> None:
    if sinks is None:
        return
    if sinks.shape != query.shape[1:2] or sinks.dtype != torch.float32:
        raise ValueError(f"sinks must be float32 [{query.shape[1]}], one per head")
    if sinks.device != query.device or not sinks.is_contiguous():
        raise ValueError(f"sinks must be contiguous and on {query.device}")


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError("caches must both be [num_blocks, kv_heads, block_size, head_dim]")
    if key_cache.stride() != value_cache.stride() or key_cache.dtype != value_cache.dtype:
        raise ValueError("key_cache and value_cache must have the same strides and dtype")
    _check_rows("key_cache", key_cache)


def _check_scales(scales: KVScales | None, key_cache: torch.Tensor) -> None:
    is_quantised = key_cache.dtype in LARGEST
    if scales is None and not is_quantised:
        return
    if scales is None or not is_quantised:
        raise ValueError(f"scales go with a cache of {list(LARGEST)}: it is {key_cache.dtype}")
    for name, tensor in (("key", scales.keys), ("value", scales.values)):
        if tensor.shape != key_cache.shape[:3] or tensor.dtype != torch.float32:
            raise ValueError(f"{name} scales must be float32 {tuple(key_cache.shape[:3])}")
        if tensor.device != key_cache.device or not tensor.is_contiguous():
            raise ValueError(f"{name} scales must be contiguous and on {key_cache.device}")


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
