"""Block tables: which KV blocks a sequence holds, and which prefixes are already computed."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.messages import KvEvents, KvSnapshot
from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE, ROOT_HASH, ROUTING_STRIDE, hash_block
from tidemill_gpuworker.block_pool import BlockPool
from tidemill_gpuworker.sequence import Sequence

#: Share of the blocks kept free for running sequences to grow into when another one is admitted.
DEFAULT_WATERMARK = 0.01


class BlockManager:
    """Gives KV blocks to sequences, and finds the blocks of prefixes computed before.

    A block becomes findable when the step that fills it is *scheduled*, so that a sequence
    admitted later in the same step shares it: a step writes the KV entries of all its rows before
    any row attends.  Until ``commit_step`` these blocks are provisional; ``rollback_step`` hides
    them again if the step failed.  The manager owns ``block_table`` and ``block_hashes`` of the
    sequences and reads, but never sets, ``num_computed_tokens``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        watermark: float = DEFAULT_WATERMARK,
        enable_prefix_caching: bool = True,
    ) -> None:
        _check_sizes(num_blocks, block_size, watermark)
        self.block_size = block_size
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        # Published but not computed yet, with the sequence that will compute it in this step.
        self._provisional: dict[int, Sequence] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks of the KV cache."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached prefixes among them."""
        return self._pool.num_free_blocks

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free blocks in the order in which they will be reused."""
        return self._pool.free_blocks

    @property
    def num_evictions(self) -> int:
        """How often a cached block was overwritten to make room."""
        return self._pool.num_evictions

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return how many blocks ``seq`` still has to get for the tokens known so far."""
        return max(0, self.num_blocks_for(seq.num_tokens) - len(seq.block_table))

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix of ``seq``.

        The last known token is never part of it: it must go through the model to give logits.
        """
        blocks: list[int] = []
        for index in range(self._max_prefix_blocks(seq)):
            block = self._pool.find(self._block_hash(seq, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_prefix(self, seq: Sequence) -> int:
        """Return the length in blocks of what ``find_prefix`` would find.

        Starts from the last count, so it costs next to nothing to ask again.  That is exact
        because a cached block's predecessors are cached too: heads outlive tails.
        """
        count, limit = seq.num_prefix_blocks, self._max_prefix_blocks(seq)
        while count > 0 and self._pool.find(self._block_hash(seq, count - 1)) is None:
            count -= 1
        while count < limit and self._pool.find(self._block_hash(seq, count)) is not None:
            count += 1
        seq.num_prefix_blocks = count
        return count

    def count_shared(self, seq: Sequence, before: Sequence | None) -> int:
        """Return how many blocks of a prefix are cached, or will be once ``before`` is computed."""
        count = self.count_prefix(seq)
        if before is None:
            return count
        limit = min(self._max_prefix_blocks(seq), before.num_tokens // self.block_size)
        return bisect_left(range(limit), True, lo=count, key=partial(self._differ, seq, before))

    def awaits(self, seq: Sequence, prefix: list[int], leader: Sequence) -> bool:
        """Whether the first block that ``prefix`` lacks is the one that ``leader`` fills next."""
        index = len(prefix)
        is_next = leader.num_computed_tokens // self.block_size == index
        if not is_next or (index + 1) * self.block_size > leader.num_tokens:
            return False
        if index >= self._max_prefix_blocks(seq):
            return False
        return self._block_hash(seq, index) == self._block_hash(leader, index)

    def can_admit(self, seq: Sequence, prefix: list[int], num_reserved_blocks: int = 0) -> bool:
        """Whether all known tokens of ``seq`` fit, beside its cached ``prefix``.

        ``num_reserved_blocks`` free blocks are left for others.
        """
        needed = self.num_blocks_for(seq.num_tokens) - len(prefix)
        # A cached block that nobody holds is both free and about to be used.
        reused = sum(self._pool.is_free(block) for block in prefix)
        return needed + reused + num_reserved_blocks <= self._pool.num_free_blocks

    def adopt_prefix(self, seq: Sequence, prefix: list[int]) -> None:
        """Start the block table of ``seq`` with the blocks that ``find_prefix`` returned."""
        assert not seq.block_table, f"{seq.seq_id} already holds blocks"
        self._pool.touch(prefix)
        seq.block_table = list(prefix)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give ``seq`` the blocks for its next ``num_tokens`` known tokens and publish full ones.

        Returns False, and changes nothing, if there are not enough free blocks.
        """
        end = seq.num_computed_tokens + num_tokens
        assert end <= seq.num_tokens, f"{seq.seq_id} has no token at position {end - 1}"
        missing = self.num_blocks_for(end) - len(seq.block_table)
        if missing > 0:
            if missing > self._pool.num_free_blocks:
                return False
            seq.block_table += self._pool.take(missing)
        self._publish(seq, end)
        return True

    def free(self, seq: Sequence) -> None:
        """Take all blocks from ``seq``; computed full ones stay findable until reused."""
        for block in seq.block_table:
            if self._provisional.get(block) is seq:
                assert self._pool.ref_count(block) == 1, f"a follower of {seq.seq_id} would starve"
                self._pool.unpublish(block)
                del self._provisional[block]
        self._pool.release(seq.block_table)
        seq.block_table = []

    def commit_step(self) -> None:
        """Note that the step has run: the blocks published for it now hold what they promise."""
        self._provisional.clear()

    def rollback_step(self) -> None:
        """Hide the blocks that the failed step was to fill; whoever shares them must free them."""
        for block in self._provisional:
            self._pool.unpublish(block)
        self._provisional.clear()

    def collect_events(self) -> KvEvents | None:
        """Return what became of computed prefixes since the last call; None if nothing did.

        Between steps only, so that no block counts that a step has not filled yet.
        """
        assert not self._provisional, "events are collected between steps only"
        return self._pool.routing.collect()

    def snapshot(self) -> KvSnapshot:
        """Return all that the collected events told of."""
        return self._pool.routing.snapshot()

    def hint(self, refs: Mapping[bytes, int]) -> None:
        """Note which prefixes waiting jobs will use: routing hash -> jobs, 0 for no more.

        They are evicted last.
        """
        self._pool.hint(refs)

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Assert that the block tables of ``holders`` are exactly what the pool believes."""
        self._pool.check_integrity()
        references = Counter(block for seq in holders for block in seq.block_table)
        for block in range(self.num_blocks):
            expected, actual = references[block], self._pool.ref_count(block)
            assert expected == actual, f"block {block}: {expected} holders, count {actual}"

    def _max_prefix_blocks(self, seq: Sequence) -> int:
        # A block that is found gives no hidden states, and so no logprobs.
        may_look = self.enable_prefix_caching and not seq.lacks_prompt_logprobs
        return (seq.num_tokens - 1) // self.block_size if may_look else 0

    def _publish(self, seq: Sequence, end: int) -> None:
        if not self.enable_prefix_caching:
            return
        first, last = seq.num_computed_tokens // self.block_size, end // self.block_size
        if first == last:
            return
        parent = self._block_hash(seq, first - 1) if first else None
        for index in range(first, last):
            block, block_hash = seq.block_table[index], self._block_hash(seq, index)
            is_routing = index % ROUTING_STRIDE == ROUTING_STRIDE - 1
            self._pool.publish(block, block_hash, parent, is_routing)
            parent = block_hash
            self._provisional[block] = seq

    def _block_hash(self, seq: Sequence, index: int) -> bytes:
        hashes, size = seq.block_hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else ROOT_HASH
            extra = None if hashes else seq.extra_keys
            hashes.append(hash_block(parent, seq.token_slice(start, start + size), extra))
        return hashes[index]

    def _differ(self, left: Sequence, right: Sequence, index: int) -> bool:
        return self._block_hash(left, index) != self._block_hash(right, index)


def _check_sizes(num_blocks: int, block_size: int, watermark: float) -> None:
    if num_blocks < 1 or block_size < 1:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks of {block_size} tokens is empty",
            fix="Give it more memory, or set num_blocks and block_size to 1 or more.",
        )
    if not 0.0 <= watermark < 1.0:
        raise ConfigError(
            f"watermark {watermark} is not a share of the KV blocks",
            fix="Choose a value from 0 up to, not including, 1; the default is 0.01.",
        )
