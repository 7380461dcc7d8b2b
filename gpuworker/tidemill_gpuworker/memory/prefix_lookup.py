"""Finds which blocks of a sequence were computed before, on the device or in the CPU tier."""

from bisect import bisect_left
from functools import partial

from tidemill.protocol.prefix import ROOT_HASH, hash_block
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_pool import BlockPool
from tidemill_gpuworker.memory.cpu_tier import CpuTier
from tidemill_gpuworker.memory.places import longest_chain, longest_windowed_chain, place_of_slot


class PrefixLookup:
    """Looks up prefixes by their hashes, which it computes once and keeps with the sequence.

    ``window``: how far back any query reads, its own token included; None for all the way.
    """

    def __init__(
        self,
        pool: BlockPool,
        tier: CpuTier,
        block_size: int,
        *,
        is_enabled: bool = True,
        window: int | None = None,
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._window = window

    def find(self, seq: Sequence) -> list[int]:
        """Return the places of the longest cached prefix, which never has the last known token.

        That one must go through the model to give logits.
        """
        limit, find = self._most_blocks(seq), partial(self._place_of, seq)
        if self._window is None:
            return longest_chain(limit, find)
        return longest_windowed_chain(limit, self._first_needed, find)

    def count(self, seq: Sequence) -> int:
        """Return the length in blocks of what ``find`` would find.

        Starts from the last count, so it costs next to nothing to ask again.  That is exact
        because a cached block's predecessors are cached too: heads outlive tails.  With a CPU tier
        it may be off while one of them moves; with a window it is counted anew.
        """
        if self._window is not None:
            return len(self.find(seq))
        count, limit = seq.num_prefix_blocks, self._most_blocks(seq)
        while count > 0 and self._place_of(seq, count - 1) is None:
            count -= 1
        while count < limit and self._place_of(seq, count) is not None:
            count += 1
        seq.num_prefix_blocks = count
        return count

    def count_shared(self, seq: Sequence, before: Sequence | None) -> int:
        """Return how many blocks of a prefix are cached, or will be once ``before`` is computed."""
        count = self.count(seq)
        if before is None:
            return count
        limit = min(self._most_blocks(seq), before.num_tokens // self._block_size)
        return bisect_left(range(limit), True, lo=count, key=partial(self._differ, seq, before))

    def awaits(self, seq: Sequence, prefix: list[int], leader: Sequence) -> bool:
        """Whether the first block that ``prefix`` lacks is the one that ``leader`` fills next."""
        index = len(prefix)
        is_next = leader.num_computed_tokens // self._block_size == index
        if not is_next or (index + 1) * self._block_size > leader.num_tokens:
            return False
        if index >= self._most_blocks(seq):
            return False
        return self.block_hash(seq, index) == self.block_hash(leader, index)

    def block_hash(self, seq: Sequence, index: int) -> bytes:
        """Return the hash of a full block of known tokens, chained to those before it."""
        hashes, size = seq.block_hashes, self._block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else ROOT_HASH
            extra = None if hashes else seq.extra_keys
            hashes.append(hash_block(parent, seq.token_slice(start, start + size), extra))
        return hashes[index]

    def first_in_window(self, position: int) -> int:
        """Return the first block that the token at ``position``, or one behind it, reads."""
        if self._window is None:
            return 0
        return max(0, position - self._window + 1) // self._block_size

    def _most_blocks(self, seq: Sequence) -> int:
        # A block that is found gives no hidden states, and so no logprobs.
        may_look = self._is_enabled and not seq.lacks_prompt_logprobs
        return (seq.num_tokens - 1) // self._block_size if may_look else 0

    def _first_needed(self, num_blocks: int) -> int:
        return self.first_in_window(num_blocks * self._block_size)

    def _place_of(self, seq: Sequence, index: int) -> int | None:
        block_hash = self.block_hash(seq, index)
        block = self._pool.find(block_hash)
        if block is not None:
            return block
        slot = self._tier.find(block_hash)
        return None if slot is None else place_of_slot(slot)

    def _differ(self, left: Sequence, right: Sequence, index: int) -> bool:
        return self.block_hash(left, index) != self.block_hash(right, index)
