"""The same two operations in torch alone: the fallback wherever no kernel can be had."""

import torch

from tidemill_kernels.checks import check_attention, check_cache_write
from tidemill_kernels.kv_scales import KVScales, as_bytes, quantise_rows
from tidemill_kernels.metadata import AttentionMetadata
from tidemill_kernels.options import AttentionOptions


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales | None = None,
) -> None:
    """Store each token's key and value in its slot; arguments as in `reference`."""
    check_cache_write(key, value, key_cache, value_cache, slot_mapping, scales)
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    if scales is None:
        key_cache[blocks, :, offsets] = key[used]
        value_cache[blocks, :, offsets] = value[used]
        return
    for rows, cache, scale in ((key, key_cache, scales.keys), (value, value_cache, scales.values)):
        codes, scale[blocks, :, offsets] = quantise_rows(rows[used], cache.dtype)
        as_bytes(cache)[blocks, :, offsets] = as_bytes(codes)


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
    """Gather each sequence's blocks and attend in float32; arguments as in `reference`."""
    options = AttentionOptions(window, soft_cap, sinks)
    check_attention(out, query, key_cache, value_cache, metadata, options, scales)
    key_scales, value_scales = (scales.keys, scales.values) if scales else (None, None)
    starts = metadata.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        block_table = metadata.block_tables[seq]
        seen = range(options.first_visible(seq_len - (rows.stop - rows.start)), seq_len)
        keys = _gather(key_cache, key_scales, block_table, seen)
        values = _gather(value_cache, value_scales, block_table, seen)
        out[rows] = _attend(query[rows], keys, values, scale, options)


def _gather(
    cache: torch.Tensor, scales: torch.Tensor | None, block_table: torch.Tensor, positions: range
) -> torch.Tensor:
    _, kv_heads, block_size, head_dim = cache.shape
    first_block = positions.start // block_size
    ids = block_table[first_block : -(-positions.stop // block_size)].long()
    blocks = as_bytes(cache)[ids].view(cache.dtype)
    by_head = blocks.transpose(0, 1).reshape(kv_heads, -1, head_dim)
    skipped = first_block * block_size
    seen = slice(positions.start - skipped, positions.stop - skipped)
    rows = by_head[:, seen].float()
    if scales is None:
        return rows
    return rows * scales[ids].transpose(0, 1).reshape(kv_heads, -1, 1)[:, seen]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    options: AttentionOptions,
) -> torch.Tensor:
    # `keys` end at the last query's position and start at the first that any query sees.
    # Heads that share a KV head become rows of one matrix product: [kv_heads, group * tokens, D].
    num_tokens, num_heads, head_dim = query.shape
    kv_heads, seq_len, _ = keys.shape
    group_size = num_heads // kv_heads
    grouped = query.float().view(num_tokens, kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(kv_heads, -1, head_dim), keys.transpose(1, 2)) * scale
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.view(kv_heads, group_size, num_tokens, seq_len)
    if num_tokens > 1:
        scores.masked_fill_(_hidden(num_tokens, seq_len, options, query.device), float("-inf"))
    weights = _softmax(scores, options.sinks).reshape(kv_heads, -1, seq_len)
    mixed = torch.bmm(weights, values).view(kv_heads, group_size, num_tokens, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(query.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    kv_heads, group_size, num_tokens, _ = scores.shape
    column = sinks.view(kv_heads, group_size, 1, 1).expand(-1, -1, num_tokens, 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def _hidden(
    num_tokens: int, seq_len: int, options: AttentionOptions, device: torch.device
) -> torch.Tensor:
    positions = torch.arange(seq_len - num_tokens, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    hidden = keys > positions
    return hidden | (keys <= positions - options.window) if options.window else hidden
