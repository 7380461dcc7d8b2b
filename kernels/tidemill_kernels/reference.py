"""The truth the kernels are tested against: plain torch in float64, written to be read."""

import torch

from tidemill_kernels.kv_scales import KVScales, quantise_rows
from tidemill_kernels.metadata import AttentionMetadata


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Store each token's key and value in its slot, one token at a time.

    Args:
        key: [tokens, kv_heads, head_dim].
        value: like `key`.
        key_cache: [num_blocks, kv_heads, block_size, head_dim]; mutated.
        value_cache: like `key_cache`; mutated.
        slot_mapping: int64 [tokens], block * block_size + offset; below 0 skips the token.
        scales: of a quantised cache, whose dtype is one of `kv_scales.LARGEST`; mutated. Each head
            of a token is quantised by itself, as `kv_scales.quantise_rows` says.
    """
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        if scales is None:
            key_cache[block, :, offset] = key[token]
            value_cache[block, :, offset] = value[token]
            continue
        for row, cache, scale in (
            (key[token], key_cache, scales.keys),
            (value[token], value_cache, scales.values),
        ):
            codes, scale[block, :, offset] = quantise_rows(row, cache.dtype)
            cache[block, :, offset] = codes


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
    """Softmax attention of every query token over its sequence's cached tokens.

    Args:
        out: [tokens, heads, head_dim], any float dtype; mutated.
        query: [tokens, heads, head_dim].
        key_cache: [num_blocks, kv_heads, block_size, head_dim].
        value_cache: like `key_cache`.
        metadata: where each sequence's queries and blocks are.
        scale: multiplies the scores before the softmax.
        window: a query at position p sees the keys from p - window + 1 on; 0 for all of them.
        soft_cap: squeezes the scaled scores into (-soft_cap, soft_cap) by a tanh; 0 for none.
        sinks: [heads], a score per head that takes part in the softmax but has no value.
        scales: of a quantised cache; its elements stand for code x scale.

    Blocks that lie outside the window of every query of their sequence are never read.
    """
    key_scales, value_scales = (scales.keys, scales.values) if scales else (None, None)
    starts = metadata.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        first = max(0, seq_len - (end - begin) - window + 1) if window else 0
        table, seen = metadata.block_tables[seq], range(first, seq_len)
        keys = _cached_tokens(key_cache, key_scales, table, seen)
        values = _cached_tokens(value_cache, value_scales, table, seen)
        for token in range(begin, end):
            stop = seq_len - (end - begin) + (token - begin) + 1 - first
            rows = slice(max(0, stop - window) if window else 0, stop)
            out[token] = _attend(query[token], keys[rows], values[rows], scale, soft_cap, sinks)


def _cached_tokens(
    cache: torch.Tensor, scales: torch.Tensor | None, block_table: torch.Tensor, positions: range
) -> torch.Tensor:
    block_size = cache.shape[2]
    rows = []
    for position in positions:
        block, offset = int(block_table[position // block_size]), position % block_size
        row = cache[block, :, offset].double()
        rows.append(row if scales is None else row * scales[block, :, offset, None].double())
    return torch.stack(rows)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    group_size = query.shape[0] // keys.shape[1]
    wide_keys = keys.repeat_interleave(group_size, dim=1)
    wide_values = values.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("hd,khd->hk", query.double(), wide_keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        weights = torch.cat((scores, sinks.double()[:, None]), dim=-1).softmax(dim=-1)[:, :-1]
    return torch.einsum("hk,khd->hd", weights, wide_values)
