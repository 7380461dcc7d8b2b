"""Paged attention, cache writes and seeded sampling for CPUs and CUDA devices.

Every implementation shares one cache layout, `[num_blocks, kv_heads, block_size, head_dim]`, and
one contract, written down in `tidemill_kernels.reference`.
"""

from tidemill_kernels.backend import AttentionBackend, select_backend
from tidemill_kernels.kv_scales import KVScales
from tidemill_kernels.metadata import AttentionMetadata

__all__ = ["AttentionBackend", "AttentionMetadata", "KVScales", "select_backend"]
