"""The truth the kernels are tested against: plain torch in float64, written to be read."""

import torch

from tidemill_kernels.metadata import AttentionMetadata


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store each token's key and value in its slot, one token at a time.

    Args:
        key: [tokens, kv_heads, head_dim].
        value: like `key`.
        key_cache: [num_blocks, kv_heads, block_size, head_dim]; mutated.
        value_cache: like `key_cache`; mutated.
        slot_mapping: int64 [tokens], block * block_size + offset; below 0 skips the token.
    """
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            key_cache[block, :, offset] = key[token]
            value_cache[block, :, offset] = value[token]


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """Softmax attention of every query token over its sequence's cached tokens.

    Args:
        out: [tokens, heads, head_dim], any float dtype; mutated.
        query: [tokens, heads, head_dim].
        key_cache: [num_blocks, kv_heads, block_size, head_dim].
        value_cache: like `key_cache`.
        metadata: where each sequence's queries and blocks are.
        scale: multiplies the scores before the softmax.
    """
    starts = metadata.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        keys = _cached_tokens(key_cache, metadata.block_tables[seq], seq_len)
        values = _cached_tokens(value_cache, metadata.block_tables[seq], seq_len)
        for token in range(begin, end):
            num_visible = seq_len - (end - begin) + (token - begin) + 1
            out[token] = _attend(query[token], keys[:num_visible], values[:num_visible], scale)


def _cached_tokens(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    block_size = cache.shape[2]
    rows = [
        cache[int(block_table[position // block_size]), :, position % block_size]
        for position in range(seq_len)
    ]
    return torch.stack(rows)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    group_size = query.shape[0] // keys.shape[1]
    wide_keys = keys.double().repeat_interleave(group_size, dim=1)
    wide_values = values.double().repeat_interleave(group_size, dim=1)
    scores = torch.einsum("hd,khd->hk", query.double(), wide_keys) * scale
    return torch.einsum("hk,khd->hd", scores.softmax(dim=-1), wide_values)
