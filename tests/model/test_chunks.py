"""Attention in chunks: each token sees its own chunk, whatever step it comes in."""

import pytest
import torch

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.models.chunks import check_chunks, in_chunks
from tidemill_kernels import AttentionMetadata, reference

HEADS, DIM, BLOCK, CHUNK = 2, 8, 4, 8


def make_metadata(spans: list[tuple[int, int]], num_decodes: int) -> AttentionMetadata:
    """Sequences of which the tokens from the first to the second number are new."""
    width = max(-(-end // BLOCK) for _, end in spans)
    # Blocks of all sequences in one shuffled pool.
    order = torch.randperm(width * len(spans), generator=torch.Generator().manual_seed(3))
    lengths = [end - start for start, end in spans]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return AttentionMetadata(
        block_tables=order.view(len(spans), width).int(),
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32),
        cu_seqlens_q=ends.int(),
        max_seqlen_q=max(lengths),
        max_seq_len=max(end for _, end in spans),
        num_decodes=num_decodes,
    )


def masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: list[tuple[int, int]]
) -> torch.Tensor:
    """Attention under a mask of chunks; keys and values [sequences, tokens, heads, dim]."""
    rows, offset = [], 0
    for seq, (start, end) in enumerate(spans):
        for position in range(start, end):
            seen = [p for p in range(position + 1) if p // CHUNK == position // CHUNK]
            scores = torch.einsum("hd,khd->hk", query[offset], keys[seq, seen]) * DIM**-0.5
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seq, seen]))
            offset += 1
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("spans", "num_decodes"),
    [
        ([(0, 30)], 0),
        ([(7, 8), (8, 9), (20, 21)], 3),
        ([(15, 16), (3, 4), (5, 17), (8, 16), (0, 8), (7, 9)], 2),
        ([(31, 33), (0, 3)], 0),
    ],
)
def test_each_token_sees_its_own_chunk(spans: list[tuple[int, int]], num_decodes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    metadata = make_metadata(spans, num_decodes)
    num_blocks, longest = metadata.block_tables.numel(), metadata.block_tables.shape[1] * BLOCK
    query = torch.randn(sum(e - s for s, e in spans), HEADS, DIM, generator=generator).double()
    shape = (len(spans), longest, HEADS, DIM)
    keys, values = (torch.randn(shape, generator=generator).double() for _ in range(2))
    caches = [torch.empty(num_blocks, HEADS, BLOCK, DIM).double() for _ in range(2)]
    for cache, rows in zip(caches, (keys, values), strict=True):
        blocks = rows.view(len(spans), -1, BLOCK, HEADS, DIM).transpose(2, 3)
        cache[metadata.block_tables.long()] = blocks
    out = torch.empty_like(query)

    cut = in_chunks(metadata, CHUNK, BLOCK)
    reference.paged_attention(out, query, *caches, cut, DIM**-0.5)

    torch.testing.assert_close(out, masked_attention(query, keys, values, spans))
    assert cut.max_seq_len <= CHUNK
    assert cut.num_decodes == num_decodes


def test_sequences_within_their_first_chunk_are_left_as_they_are() -> None:
    metadata = make_metadata([(3, 8), (0, 5)], 0)
    assert in_chunks(metadata, CHUNK, BLOCK) is metadata


def test_chunks_must_begin_where_blocks_do() -> None:
    check_chunks(8192, 128, 100_000)
    check_chunks(0, 16, 100_000)
    # Nothing is longer than the first chunk.
    check_chunks(40, 16, 40)
    with pytest.raises(ConfigError, match=r"16 does not divide .* attention_chunk_size 40"):
        check_chunks(40, 16, 41)
