"""Paged attention problems with everything around the data poisoned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidemill_kernels import AttentionMetadata, reference
from tidemill_kernels.options import AttentionOptions

# Guard blocks around each cache: any value read from them turns the output into NaN.
_NUM_GUARDS = 2
# The relative error (Frobenius norm) that the rounding of each dtype explains.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of one attention problem."""

    num_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Problem:
    """Inputs of one `paged_attention` call."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float

    def expected(self, options: AttentionOptions | None = None) -> torch.Tensor:
        """Return the output of the float64 reference on the CPU."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        metadata = move_metadata(self.metadata, torch.device("cpu"))
        tensors = [t.cpu() for t in (self.query, self.key_cache, self.value_cache)]
        keywords = as_keywords(options)
        if keywords.get("sinks") is not None:
            keywords["sinks"] = keywords["sinks"].cpu()
        reference.paged_attention(out, *tensors, metadata, self.scale, **keywords)
        return out

    def forget_blocks_before_windows(self, window: int) -> None:
        """Make the table entries of blocks that no query sees any more point beyond the cache."""
        block_size = self.key_cache.shape[2]
        lengths = self.metadata.cu_seqlens_q.diff().tolist()
        for seq, seq_len in enumerate(self.metadata.seq_lens.tolist()):
            first = max(0, seq_len - lengths[seq] - window + 1) // block_size
            self.metadata.block_tables[seq, :first] = 2**30

    def poisoned_out(self) -> torch.Tensor:
        """Return an output full of NaN, so that a row never written is seen."""
        return torch.full_like(self.query, float("nan"))


def make_problem(
    shape: Shape,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Return a random problem with shuffled blocks; leading 1s of `query_lens` are decodes."""
    generator = torch.Generator().manual_seed(seed)
    metadata, num_blocks = _make_metadata(shape, query_lens, seq_lens, generator)
    cache_shape = (num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    caches = [_guarded(cache_shape, shape, metadata, generator) for _ in range(2)]
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, generator=generator).to(
        shape.dtype
    )
    target = torch.device(device)
    return Problem(
        query=query.to(target),
        key_cache=caches[0].to(target),
        value_cache=caches[1].to(target),
        metadata=move_metadata(metadata, target),
        scale=shape.head_dim**-0.5,
    )


def as_keywords(options: AttentionOptions | None) -> dict[str, Any]:
    """Return options as the keyword arguments of `paged_attention`."""
    if options is None:
        return {}
    return {"window": options.window, "soft_cap": options.soft_cap, "sinks": options.sinks}


def make_options(
    num_heads: int, *, window: int = 0, soft_cap: float = 0.0, with_sinks: bool = False
) -> AttentionOptions:
    """Return options; sinks are large enough to take a good part of the softmax."""
    generator = torch.Generator().manual_seed(9)
    sinks = 2 * torch.randn(num_heads, generator=generator) + 2 if with_sinks else None
    return AttentionOptions(window, soft_cap, sinks)


def move_metadata(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """Return the same metadata on another device."""
    return AttentionMetadata(
        block_tables=metadata.block_tables.to(device),
        seq_lens=metadata.seq_lens.to(device),
        cu_seqlens_q=metadata.cu_seqlens_q.to(device),
        max_seqlen_q=metadata.max_seqlen_q,
        max_seq_len=metadata.max_seq_len,
        num_decodes=metadata.num_decodes,
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected| in float64; NaN where either has one."""
    difference = actual.detach().cpu().double() - expected
    return float(difference.norm() / expected.norm())


def _make_metadata(
    shape: Shape, query_lens: Sequence[int], seq_lens: Sequence[int], generator: torch.Generator
) -> tuple[AttentionMetadata, int]:
    counts = [-(-length // shape.block_size) for length in seq_lens]
    num_blocks = sum(counts) + 2 * _NUM_GUARDS
    usable = torch.randperm(sum(counts), generator=generator) + _NUM_GUARDS
    tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(usable.split(counts)):
        tables[row, : len(blocks)] = blocks
    ends = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    metadata = AttentionMetadata(
        block_tables=tables,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=ends,
        max_seqlen_q=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=_count_decodes(query_lens),
    )
    return metadata, num_blocks


def _count_decodes(query_lens: Sequence[int]) -> int:
    first_prefill = (index for index, length in enumerate(query_lens) if length != 1)
    return next(first_prefill, len(query_lens))


def _guarded(
    cache_shape: tuple[int, ...],
    shape: Shape,
    metadata: AttentionMetadata,
    generator: torch.Generator,
) -> torch.Tensor:
    # NaN everywhere but in the slots that hold a token of some sequence.
    cache = torch.full(cache_shape, float("nan"))
    for table, length in zip(metadata.block_tables, metadata.seq_lens.tolist(), strict=True):
        for position in range(length):
            block, offset = table[position // shape.block_size], position % shape.block_size
            cache[block, :, offset] = torch.randn(
                shape.kv_heads, shape.head_dim, generator=generator
            )
    return cache.to(shape.dtype)
