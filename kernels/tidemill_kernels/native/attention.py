"""Cache write and paged attention on the CPU: argument checks, then one call into C++."""

import ctypes

import torch

from tidemill_kernels import torch_ops
from tidemill_kernels.checks import check_attention, check_cache_write
from tidemill_kernels.kv_scales import KVScales
from tidemill_kernels.metadata import AttentionMetadata
from tidemill_kernels.native.library import AttentionArgs, CacheWriteArgs, QuantisedWriteArgs
from tidemill_kernels.options import AttentionOptions

_LANES = 8
# No sequence is longer; adding a position to it must not overflow 32 bits.
_MAX_WINDOW = 2**30
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
# Mirror of `KVFormat` in src/attention.h.
_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}


class NativeAttention:
    """The two attention operations of a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: KVScales | None = None,
    ) -> None:
        """Store each token's key and value in its slot; arguments as in `reference`.

        What a quantised cache is given in float16 goes to `torch_ops`.

        Raises:
            ValueError: shapes or dtypes do not fit.
            IndexError: a slot lies beyond the cache; nothing was written.
        """
        check_cache_write(key, value, key_cache, value_cache, slot_mapping, scales)
        tensors = (key, value, key_cache, value_cache, slot_mapping)
        if scales is None:
            args = _cache_write_args(*tensors)
            bad = self._library.tidemill_reshape_and_cache(ctypes.byref(args))
        elif key.dtype in _NATIVE_DTYPES:
            quantised = _quantised_write_args(*tensors, scales)
            bad = self._library.tidemill_quantise_and_cache(ctypes.byref(quantised))
        else:
            torch_ops.reshape_and_cache(*tensors, scales)
            return
        if bad:
            slot, num_slots = int(slot_mapping[bad - 1]), key_cache.shape[0] * key_cache.shape[2]
            raise IndexError(f"token {bad - 1}: slot {slot} is beyond the {num_slots} slots")

    def paged_attention(
        self,
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

        Dtypes other than float32 and bfloat16, and head dimensions that are not a multiple of 8, go
        to `torch_ops`.

        Raises:
            ValueError: shapes or dtypes do not fit.
            IndexError: a sequence's lengths or blocks are impossible; nothing was written.
        """
        options = AttentionOptions(window, soft_cap, sinks)
        check_attention(out, query, key_cache, value_cache, metadata, options, scales)
        tensors = (out, query, key_cache, value_cache)
        if not _is_native(out, query, key_cache):
            torch_ops.paged_attention(
                *(*tensors, metadata, scale),
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
                scales=scales,
            )
            return
        args = _attention_args(*tensors, metadata, scale, options, scales)
        bad = self._library.tidemill_paged_attention(ctypes.byref(args))
        if bad:
            raise IndexError(f"sequence {bad - 1}: impossible lengths, or a block out of range")


def _is_native(out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor) -> bool:
    same = out.dtype == query.dtype and key_cache.dtype in (query.dtype, *_KV_FORMATS)
    return same and query.dtype in _NATIVE_DTYPES and query.shape[2] % _LANES == 0


def _cache_write_args(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> CacheWriteArgs:
    num_blocks, kv_heads, block_size, head_dim = key_cache.shape
    size = key_cache.element_size()
    return CacheWriteArgs(
        *(key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()),
        slot_mapping.data_ptr(),
        *(key.stride(0) * size, key.stride(1) * size),
        *(value.stride(0) * size, value.stride(1) * size),
        *(stride * size for stride in key_cache.stride()[:3]),
        *(slot_mapping.shape[0], num_blocks * block_size),
        *(block_size, kv_heads, head_dim * size, torch.get_num_threads()),
    )


def _quantised_write_args(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales,
) -> QuantisedWriteArgs:
    num_blocks, kv_heads, block_size, head_dim = key_cache.shape
    return QuantisedWriteArgs(
        *(key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()),
        *(scales.keys.data_ptr(), scales.values.data_ptr(), slot_mapping.data_ptr()),
        *(*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3]),
        *(slot_mapping.shape[0], num_blocks * block_size),
        *(block_size, kv_heads, head_dim, _KV_FORMATS[key_cache.dtype]),
        *(key.dtype == torch.bfloat16, torch.get_num_threads()),
    )


def _attention_args(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    options: AttentionOptions,
    scales: KVScales | None,
) -> AttentionArgs:
    num_blocks, kv_heads, block_size, head_dim = key_cache.shape
    return AttentionArgs(
        *(out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()),
        metadata.block_tables.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.cu_seqlens_q.data_ptr(),
        None if options.sinks is None else options.sinks.data_ptr(),
        None if scales is None else scales.keys.data_ptr(),
        None if scales is None else scales.values.data_ptr(),
        *out.stride()[:2],
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *(num_blocks, metadata.block_tables.shape[1], block_size),
        *(query.shape[1], kv_heads, head_dim),
        *(metadata.num_decodes, metadata.num_seqs),
        *(query.dtype == torch.bfloat16, torch.get_num_threads()),
        0 if scales is None else _KV_FORMATS[key_cache.dtype],
        *(min(options.window, _MAX_WINDOW), scale, options.soft_cap),
    )
