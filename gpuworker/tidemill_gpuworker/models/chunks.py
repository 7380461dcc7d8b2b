"""Attention within chunks of a sequence, as attention over sequences that are these chunks."""

import numpy as np
import numpy.typing as npt
import torch

from tidemill.protocol.errors import ConfigError
from tidemill_kernels import AttentionMetadata

_Ints = npt.NDArray[np.int64]


def check_chunks(chunk: int, block_size: int, max_model_len: int) -> None:
    """Raise ConfigError if chunks of so many tokens begin inside of blocks."""
    if chunk < max_model_len and chunk % block_size:
        raise ConfigError(
            f"--block-size {block_size} does not divide the model's attention_chunk_size {chunk}",
            fix=f"Choose a divisor of {chunk}, or a --max-model-len of {chunk} or less.",
        )


def in_chunks(metadata: AttentionMetadata, chunk: int, block_size: int) -> AttentionMetadata:
    """Return the layout under which each token sees its own chunk alone.

    Every sequence is cut where its chunks of ``chunk`` tokens end, and each piece with new tokens
    is a sequence of its own, whose blocks are those of its chunk (as in vLLM's local attention).
    ``chunk`` is a multiple of ``block_size``.  Waits for the device if a sequence is longer.
    """
    if metadata.max_seq_len <= chunk:
        return metadata
    ends = metadata.seq_lens.cpu().numpy().astype(np.int64)
    starts = ends - np.diff(metadata.cu_seqlens_q.cpu().numpy())
    rows, numbers = _pieces(starts // chunk, (ends - 1) // chunk)
    begins = np.maximum(starts[rows], numbers * chunk)
    stops = np.minimum(ends[rows], (numbers + 1) * chunk)
    query_lens, seq_lens = stops - begins, stops - numbers * chunk
    device = metadata.seq_lens.device
    tables = _tables(metadata, rows, numbers * chunk // block_size, -(-seq_lens // block_size))
    return AttentionMetadata(
        block_tables=tables,
        seq_lens=_int32(seq_lens, device),
        cu_seqlens_q=_int32(np.concatenate(([0], np.cumsum(query_lens))), device),
        max_seqlen_q=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        # A single token lies in one chunk.
        num_decodes=metadata.num_decodes,
    )


def _pieces(first: _Ints, last: _Ints) -> tuple[_Ints, _Ints]:
    """Return sequence and chunk of each piece, of the chunks ``first`` to ``last`` of each."""
    counts = last - first + 1
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, first[rows] + within


def _tables(
    metadata: AttentionMetadata, rows: _Ints, first_blocks: _Ints, num_blocks: _Ints
) -> torch.Tensor:
    device, width = metadata.block_tables.device, metadata.block_tables.shape[1]
    columns = first_blocks[:, None] + np.arange(num_blocks.max())
    # Entries behind a piece are never read, but must be numbers of blocks.
    wanted = torch.from_numpy(np.minimum(columns, width - 1)).to(device)
    return metadata.block_tables[torch.from_numpy(rows).to(device)[:, None], wanted]


def _int32(values: _Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
