"""Block tables: which KV blocks a sequence holds, and which prefixes are already computed."""

from collections import Counter
from collections.abc import Iterable, Mapping

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.messages import KvEvents, KvSnapshot
from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE, ROUTING_STRIDE
from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence
from tidemill_gpuworker.memory.block_copies import BlockCopies, CopyLedger, Fork
from tidemill_gpuworker.memory.block_pool import BlockPool
from tidemill_gpuworker.memory.cpu_tier import CpuTier
from tidemill_gpuworker.memory.places import NO_BLOCK, slot_of
from tidemill_gpuworker.memory.prefix_lookup import PrefixLookup

#: Share of the blocks kept free for running sequences to grow into when another one is admitted.
DEFAULT_WATERMARK = 0.01


class BlockManager:
    """Gives KV blocks to sequences, and finds the blocks of prefixes computed before.

    A block becomes findable when the step that fills it is *scheduled*, so that a sequence
    admitted later in the same step shares it: a step writes the KV entries of all its rows before
    any row attends.  Until ``commit_step`` these blocks are provisional; ``rollback_step`` hides
    them again if the step failed.  The manager owns ``block_table`` and ``block_hashes`` of the
    sequences and reads, but never sets, ``num_computed_tokens``.

    With ``num_swap_blocks`` the contents of computed blocks that make room for others move to a
    tier of host memory and are found there like those on the device; with ``swap_on_preemption``
    those of preempted sequences do so at once.  ``copies`` is what the step must move before it
    computes.  With a ``window``, no query reads keys further back than that, in any layer: blocks
    wholly outside are given back early, and ``NO_BLOCK`` stands in the block table instead.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        watermark: float = DEFAULT_WATERMARK,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        swap_on_preemption: bool = False,
        window: int | None = None,
    ) -> None:
        _check_sizes(num_blocks, block_size, watermark)
        self.block_size = block_size
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.swap_on_preemption = swap_on_preemption
        self.window = window
        self.tier = CpuTier(num_swap_blocks if enable_prefix_caching else 0)
        self._pool = BlockPool(num_blocks, on_evict=self._copy_out)
        self._lookup = PrefixLookup(
            self._pool, self.tier, block_size, is_enabled=enable_prefix_caching, window=window
        )
        self._ledger = CopyLedger()
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
    def num_cached_free_blocks(self) -> int:
        """Those of the free blocks that still hold a prefix."""
        return self._pool.num_cached_free_blocks

    @property
    def copies(self) -> BlockCopies:
        """What the step being planned must move before it computes."""
        return self._ledger.copies()

    @property
    def num_evictions(self) -> int:
        """How often a cached block was overwritten to make room."""
        return self._pool.num_evictions

    @property
    def num_swapped_in(self) -> int:
        """Blocks that were copied back from the CPU tier since the start."""
        return self._ledger.num_ins

    @property
    def num_swapped_out(self) -> int:
        """Blocks that were copied to the CPU tier since the start."""
        return self._ledger.num_outs

    @property
    def num_forked(self) -> int:
        """Blocks that were copied because one of their holders wrote to them, since the start."""
        return self._ledger.num_forks

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

    def num_blocks_held_alone(self, seq: Sequence) -> int:
        """Return how many blocks would be free without ``seq``."""
        return sum(self._pool.ref_count(b) == 1 for b in seq.block_table if b != NO_BLOCK)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the places (``places.py``) of the longest cached prefix of ``seq``."""
        return self._lookup.find(seq)

    def count_prefix(self, seq: Sequence) -> int:
        """Return the length in blocks of what ``find_prefix`` would find, at little cost."""
        return self._lookup.count(seq)

    def count_shared(self, seq: Sequence, before: Sequence | None) -> int:
        """Return how many blocks of a prefix are cached, or will be once ``before`` is computed."""
        return self._lookup.count_shared(seq, before)

    def awaits(self, seq: Sequence, prefix: list[int], leader: Sequence) -> bool:
        """Whether the first block that ``prefix`` lacks is the one that ``leader`` fills next."""
        return self._lookup.awaits(seq, prefix, leader)

    def can_admit(self, seq: Sequence, prefix: list[int], num_reserved_blocks: int = 0) -> bool:
        """Whether all known tokens of ``seq`` fit, beside its cached ``prefix``.

        ``num_reserved_blocks`` free blocks are left for others.
        """
        swapped = sum(place < NO_BLOCK for place in prefix)
        needed = self.num_blocks_for(seq.num_tokens) - len(prefix) + swapped
        # A cached block that nobody holds is both free and about to be used.
        reused = sum(self._pool.is_free(place) for place in prefix)
        return needed + reused + num_reserved_blocks <= self._pool.num_free_blocks

    def adopt_prefix(self, seq: Sequence, prefix: list[int]) -> None:
        """Start the block table of ``seq`` with what ``find_prefix`` returned.

        What is in the CPU tier gets blocks, and is there once the step has made its copies.
        """
        assert not seq.block_table, f"{seq.seq_id} already holds blocks"
        self._pool.touch(place for place in prefix if place >= 0)
        seq.block_table = list(prefix)
        seq.num_null_blocks = prefix.count(NO_BLOCK)
        swapped = [index for index, place in enumerate(prefix) if place < NO_BLOCK]
        # From the tail on, so that the tier forgets tails first, as the device does.
        for index in reversed(swapped):
            self.tier.use(self._lookup.block_hash(seq, index))
        for index, block in zip(swapped, self._pool.take(len(swapped)), strict=True):
            self._copy_in(seq, index, block)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give ``seq`` the blocks for its next ``num_tokens`` known tokens and publish full ones.

        Returns False, and gives nothing, if there are not enough free blocks.
        """
        end = seq.num_computed_tokens + num_tokens
        assert end <= seq.num_tokens, f"{seq.seq_id} has no token at position {end - 1}"
        if self.window is not None:
            self._leave_window(seq)
        missing = max(0, self.num_blocks_for(end) - len(seq.block_table))
        is_shared = self._writes_shared_block(seq)
        if missing + is_shared > self._pool.num_free_blocks:
            return False
        if is_shared:
            self._copy_on_write(seq)
        if missing:
            seq.block_table += self._pool.take(missing)
        self._publish(seq, end)
        return True

    def allocate_draft(self, seq: Sequence, num_tokens: int) -> int:
        """Give ``seq`` blocks for tokens behind the known ones; returns for how many there is room.

        They may turn out wrong: nothing is published, and nobody who needs a block goes without.
        """
        missing = self.num_blocks_for(seq.num_tokens + num_tokens) - len(seq.block_table)
        spare = max(0, self.num_free_blocks - self.num_watermark_blocks)
        seq.block_table += self._pool.take(min(max(0, missing), spare))
        return min(num_tokens, len(seq.block_table) * self.block_size - seq.num_tokens)

    def settle_draft(self, seq: Sequence, num_accepted: int) -> None:
        """Publish the blocks that accepted tokens have filled, once the step is committed.

        They are known now, but not yet among the computed ones.
        """
        assert not self._provisional, "drafts are settled between steps only"
        end = seq.num_computed_tokens + num_accepted
        self._publish(seq, end)
        self._provisional.clear()

    def trim(self, seq: Sequence) -> None:
        """Take back the blocks that ``seq`` has computed nothing for."""
        num_needed = self.num_blocks_for(seq.num_computed_tokens)
        self._pool.release(seq.block_table[num_needed:], is_batch=True)
        del seq.block_table[num_needed:]

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Give ``seq`` all blocks it will need until it is ``num_tokens`` long; they are free."""
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        seq.block_table += self._pool.take(max(0, missing))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, whose computed tokens are those of ``parent``, share its blocks.

        Between steps.  Whoever writes first to a block that the other one holds too gets a copy of
        it; that can only be the last one, as full blocks are never written again.
        """
        assert not self._provisional, "sequences are forked between steps only"
        assert not child.block_table, f"{child.seq_id} already holds blocks"
        num_tokens = parent.num_computed_tokens
        same = child.token_slice(0, num_tokens) == parent.token_slice(0, num_tokens)
        assert same, f"{child.seq_id} does not begin like {parent.seq_id}"
        child.block_table = parent.block_table[: self.num_blocks_for(num_tokens)]
        self._pool.touch(block for block in child.block_table if block != NO_BLOCK)
        child.num_null_blocks = parent.num_null_blocks
        child.num_computed_tokens = num_tokens

    def preempt(self, seq: Sequence) -> None:
        """Take all blocks from ``seq``, to be given some again later."""
        if self.swap_on_preemption:
            # From the tail on, as in ``adopt_prefix``.
            for block in reversed(seq.block_table):
                block_hash = self._pool.hash_of(block) if block != NO_BLOCK else None
                if block_hash is not None and block not in self._provisional:
                    self._copy_out(block, block_hash)
        self.free(seq)

    def free(self, seq: Sequence) -> None:
        """Take all blocks from ``seq``; computed full ones stay findable until reused."""
        if dropped := self._ledger.cancel_forks(seq):
            self._pool.release(dropped, is_batch=True)
        for block in seq.block_table:
            if self._provisional.get(block) is seq:
                assert self._num_holders(block) == 1, f"a follower of {seq.seq_id} would starve"
                self._withdraw(block)
                del self._provisional[block]
        held = [block for block in seq.block_table if block != NO_BLOCK]
        self._pool.release(held, is_batch=seq.priority_class is PriorityClass.BATCH)
        seq.block_table = []
        seq.num_null_blocks = 0

    def commit_step(self) -> None:
        """Note that the step has run: the blocks published for it now hold what they promise."""
        self._provisional.clear()
        self.tier.commit_step()
        for fork in self._ledger.forks:
            self._pool.release([fork.source], is_batch=True)
        self._ledger.commit_step()

    def rollback_step(self) -> None:
        """Hide the blocks that the failed step was to fill; whoever shares them must free them."""
        for block in self._provisional:
            self._withdraw(block)
        self._provisional.clear()
        self.tier.rollback_step()
        for fork in self._ledger.forks:
            fork.seq.block_table[fork.index] = fork.source
            self._pool.release([fork.target], is_batch=True)
        self._ledger.clear()

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
        self.tier.check_integrity()
        references = Counter(block for seq in holders for block in seq.block_table)
        references.update(fork.source for fork in self._ledger.forks)
        for block in range(self.num_blocks):
            expected, actual = references[block], self._pool.ref_count(block)
            assert expected == actual, f"block {block}: {expected} holders, count {actual}"

    def _publish(self, seq: Sequence, end: int) -> None:
        if self.enable_prefix_caching:
            for index in range(seq.num_computed_tokens // self.block_size, end // self.block_size):
                self._publish_block(seq, index)

    def _publish_block(self, seq: Sequence, index: int) -> None:
        block, block_hash = seq.block_table[index], self._lookup.block_hash(seq, index)
        parent = self._lookup.block_hash(seq, index - 1) if index else None
        is_routing = index % ROUTING_STRIDE == ROUTING_STRIDE - 1
        self._pool.publish(block, block_hash, parent, is_routing)
        self._provisional[block] = seq

    def _copy_out(self, block: int, block_hash: bytes) -> None:
        slot = self.tier.store(block_hash)
        if slot is not None:
            self._ledger.copy_out(block, slot)

    def _copy_in(self, seq: Sequence, index: int, block: int) -> None:
        slot = slot_of(seq.block_table[index])
        assert slot is not None, f"block {index} of {seq.seq_id} is not in the CPU tier"
        seq.block_table[index] = block
        self._publish_block(seq, index)
        self._ledger.copy_in(slot, block)

    def _withdraw(self, block: int) -> None:
        self._pool.unpublish(block)
        self._ledger.cancel_in(block)

    def _writes_shared_block(self, seq: Sequence) -> bool:
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        if not offset:
            return False
        block = seq.block_table[index]
        return self._num_holders(block) > 1

    def _num_holders(self, block: int) -> int:
        return self._pool.ref_count(block) - self._ledger.num_forks_from(block)

    def _copy_on_write(self, seq: Sequence) -> None:
        index = seq.num_computed_tokens // self.block_size
        [target] = self._pool.take(1)
        self._ledger.fork(Fork(seq, index, seq.block_table[index], target))
        seq.block_table[index] = target

    def _leave_window(self, seq: Sequence) -> None:
        first, last = seq.num_null_blocks, self._lookup.first_in_window(seq.num_computed_tokens)
        if first < last:
            self._pool.release(
                seq.block_table[first:last], is_batch=seq.priority_class is PriorityClass.BATCH
            )
            seq.block_table[first:last] = [NO_BLOCK] * (last - first)
            seq.num_null_blocks = last


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
