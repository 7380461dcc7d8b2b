"""The loaded C++ library and the C structures its functions take."""

import ctypes
from functools import cache
from pathlib import Path

# torch comes first so that the library shares torch's OpenMP runtime instead of loading another.
import torch  # noqa: F401

from tidemill_kernels.native.build import NativeBuildError, build_library

_POINTER = ctypes.c_void_p
_INT64 = ctypes.c_int64
_INT32 = ctypes.c_int32


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in src/attention.h; strides count elements."""

    _fields_ = [
        *((name, _POINTER) for name in ("out", "query", "key_cache", "value_cache")),
        *((name, _POINTER) for name in ("block_tables", "seq_lens", "cu_seqlens_q", "sinks")),
        *((name, _POINTER) for name in ("key_scales", "value_scales")),
        *((name, _INT64) for name in ("out_token_stride", "out_head_stride")),
        *((name, _INT64) for name in ("query_token_stride", "query_head_stride")),
        *((name, _INT64) for name in ("block_stride", "head_stride", "slot_stride")),
        *((name, _INT32) for name in ("num_blocks", "max_blocks", "block_size")),
        *((name, _INT32) for name in ("num_heads", "kv_heads", "head_dim")),
        *((name, _INT32) for name in ("num_decodes", "num_seqs")),
        *((name, _INT32) for name in ("is_bfloat16", "num_threads")),
        *((name, _INT32) for name in ("kv_format", "window")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    ]


class CacheWriteArgs(ctypes.Structure):
    """Mirror of `CacheWriteArgs` in src/cache_write.cc; strides count bytes."""

    _fields_ = [
        *((name, _POINTER) for name in ("key", "value", "key_cache", "value_cache")),
        ("slot_mapping", _POINTER),
        *((name, _INT64) for name in ("key_token_stride", "key_head_stride")),
        *((name, _INT64) for name in ("value_token_stride", "value_head_stride")),
        *((name, _INT64) for name in ("block_stride", "head_stride", "slot_stride")),
        *((name, _INT64) for name in ("num_tokens", "num_slots")),
        *((name, _INT32) for name in ("block_size", "kv_heads", "row_bytes", "num_threads")),
    ]


class QuantisedWriteArgs(ctypes.Structure):
    """Mirror of `QuantisedWriteArgs` in src/cache_write.cc; strides count elements."""

    _fields_ = [
        *((name, _POINTER) for name in ("key", "value", "key_cache", "value_cache")),
        *((name, _POINTER) for name in ("key_scales", "value_scales", "slot_mapping")),
        *((name, _INT64) for name in ("key_token_stride", "key_head_stride")),
        *((name, _INT64) for name in ("value_token_stride", "value_head_stride")),
        *((name, _INT64) for name in ("block_stride", "head_stride", "slot_stride")),
        *((name, _INT64) for name in ("num_tokens", "num_slots")),
        *((name, _INT32) for name in ("block_size", "kv_heads", "head_dim")),
        *((name, _INT32) for name in ("kv_format", "is_bfloat16", "num_threads")),
    ]


@cache
def load_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """Build if needed, load and return the native kernels; calls into it release the GIL.

    Raises:
        NativeBuildError: the library can be neither built nor loaded.
    """
    path = build_library(cache_dir)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(f"cannot load {path}: {error}; delete it to rebuild") from error
    return _declare(library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.tidemill_paged_attention.argtypes = [ctypes.POINTER(AttentionArgs)]
    library.tidemill_paged_attention.restype = ctypes.c_int
    library.tidemill_reshape_and_cache.argtypes = [ctypes.POINTER(CacheWriteArgs)]
    library.tidemill_reshape_and_cache.restype = _INT64
    library.tidemill_quantise_and_cache.argtypes = [ctypes.POINTER(QuantisedWriteArgs)]
    library.tidemill_quantise_and_cache.restype = _INT64
    library.tidemill_philox_uniform.argtypes = [
        *(ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32),
        *(_POINTER, _INT64, _POINTER),
    ]
    library.tidemill_philox_uniform.restype = None
    library.tidemill_gumbel_argmax.argtypes = [
        *(_POINTER, _INT64, _INT64, _INT64),
        *(_POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_int),
    ]
    library.tidemill_gumbel_argmax.restype = None
    return library
