"""Measures how much of the KV cache is held without holding anything."""

from collections.abc import Iterable

from tidemill.protocol.kv_use import KvUse
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager


def measure_kv_use(blocks: BlockManager, holders: Iterable[Sequence]) -> KvUse:
    """Return the figures between two steps; ``holders`` are the sequences that hold blocks."""
    size = blocks.block_size
    empty = [len(seq.block_table) * size - seq.num_computed_tokens for seq in holders]
    return KvUse(
        num_blocks=blocks.num_blocks,
        block_size=size,
        used_blocks=blocks.num_blocks - blocks.num_free_blocks,
        cached_blocks=blocks.num_cached_free_blocks,
        # Of a block that forked sequences share the empty slots count for each of them.
        empty_slots=min(sum(empty), (blocks.num_blocks - blocks.num_free_blocks) * size),
        most_empty_slots=max(empty, default=0),
        swap_blocks=blocks.tier.num_slots,
        used_swap_blocks=blocks.tier.num_used,
        swapped_out=blocks.num_swapped_out,
        swapped_in=blocks.num_swapped_in,
        forked=blocks.num_forked,
        evicted=blocks.num_evictions,
    )
