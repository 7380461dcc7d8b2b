"""What a paged attention call needs to know about the step's sequences."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Varlen layout of one step, shared by every layer and every implementation.

    The first `num_decodes` sequences have exactly one query token each; the others are prefill
    chunks. Query i of a sequence sits at position `seq_len - query_len + i` and sees the
    positions up to its own.

    Attributes:
        block_tables: int32 [num_seqs, max_blocks]; unused entries may hold anything. On a GPU,
            make max_blocks a multiple of 16: block ids then load four at a time.
        seq_lens: int32 [num_seqs]; tokens in the cache, the new ones included.
        cu_seqlens_q: int32 [num_seqs + 1]; running sum of query lengths, from 0.
        max_seqlen_q: the largest query length.
        max_seq_len: the largest `seq_lens` entry.
        num_decodes: how many leading sequences are decodes.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int

    def __post_init__(self) -> None:
        for name in ("block_tables", "seq_lens", "cu_seqlens_q"):
            _check_int32(name, getattr(self, name))
        num_seqs = self.num_seqs
        if self.block_tables.dim() != 2 or self.block_tables.shape[0] != num_seqs:
            raise ValueError(f"block_tables must be [{num_seqs}, max_blocks], one row a sequence")
        if self.cu_seqlens_q.shape != (num_seqs + 1,):
            raise ValueError(f"cu_seqlens_q must have {num_seqs + 1} entries, one per end")
        if not 0 <= self.num_decodes <= num_seqs:
            raise ValueError(f"num_decodes must be in [0, {num_seqs}], not {self.num_decodes}")

    @property
    def num_seqs(self) -> int:
        """Sequences in this step."""
        return self.seq_lens.shape[0]


def _check_int32(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, not {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
