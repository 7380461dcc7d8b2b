"""Static batching, the baseline that continuous batching is measured against."""

from collections.abc import Iterable
from itertools import islice

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager


class StaticBatch:
    """The sequences that run together: nobody joins them, and the next batch waits for the last.

    Every sequence gets the room of the longest possible one, so no more of them form a batch than
    have that room.  Raises ``ConfigError`` if not a single one has.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, blocks: BlockManager) -> None:
        per_seq = blocks.num_blocks_for(max_model_len)
        self._capacity = min(max_num_seqs, blocks.num_blocks // per_seq)
        if not self._capacity:
            raise ConfigError(
                f"static batching reserves {per_seq} KV blocks for a sequence of max_model_len "
                f"{max_model_len} tokens, there are {blocks.num_blocks}",
                fix="Lower max_model_len or give the worker a larger KV cache.",
            )
        self._members: set[str] = set()

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._members

    def form(self, waiting: Iterable[Sequence], *, is_idle: bool) -> None:
        """Choose the next batch, the most urgent first, once the last one has ended."""
        if is_idle and not any(seq in self for seq in waiting):
            self._members = {seq.seq_id for seq in islice(waiting, self._capacity)}
