"""Physical KV blocks: who holds them, which may be reused, and what full ones contain."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, free list and prefix index of ``num_blocks`` blocks.

    A block is free when nobody references it.  A free block keeps its hash, and can be found by
    it, until the block is taken again: eviction is lazy.  The free list is in order of reuse,
    least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # Two sequences can compute the same block at a time; both stay, the older one is found.
        self._blocks_by_hash: dict[bytes, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free blocks, the next one to be taken first."""
        return tuple(self._free)

    @property
    def num_cached_hashes(self) -> int:
        """Distinct block contents that a lookup can find."""
        return len(self._blocks_by_hash)

    def ref_count(self, block: int) -> int:
        """Return how many block tables hold ``block``."""
        return self._ref_counts[block]

    def is_free(self, block: int) -> bool:
        """Whether nobody references ``block``."""
        return block in self._free

    def find(self, block_hash: bytes) -> int | None:
        """Return a block with this content, free or not."""
        blocks = self._blocks_by_hash.get(block_hash)
        return blocks[0] if blocks else None

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks with one reference each, and forget what they contained."""
        assert count <= len(self._free), "the caller checks num_free_blocks"
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
            if self._hashes[block] is not None:
                self.unpublish(block)
                self.num_evictions += 1
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; free ones leave the free list."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a table.

        The table is walked from its tail, so the tail of a prefix is evicted before its head.
        Blocks without a hash are of no use to anybody and go to the front of the free list.
        """
        useless = []
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    useless.append(block)
        for block in reversed(useless):
            self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let lookups find ``block`` under the hash of its content."""
        assert self._hashes[block] is None, f"block {block} is published twice"
        self._hashes[block] = block_hash
        self._blocks_by_hash.setdefault(block_hash, []).append(block)

    def unpublish(self, block: int) -> None:
        """Hide a published block from lookups."""
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} was never published"
        self._hashes[block] = None
        blocks = self._blocks_by_hash[block_hash]
        blocks.remove(block)
        if not blocks:
            del self._blocks_by_hash[block_hash]

    def check_integrity(self) -> None:
        """Assert that free list, reference counts and prefix index tell the same story."""
        unreferenced = {block for block, count in enumerate(self._ref_counts) if count == 0}
        assert unreferenced == set(self._free), "the free list is not the set of unreferenced ones"
        assert min(self._ref_counts, default=0) >= 0, "a block was released too often"
        published = {
            (block, block_hash) for block, block_hash in enumerate(self._hashes) if block_hash
        }
        indexed = [
            (block, block_hash)
            for block_hash, blocks in self._blocks_by_hash.items()
            for block in blocks
        ]
        assert len(indexed) == len(published), "a block is indexed twice"
        assert set(indexed) == published, "the prefix index contradicts the blocks' hashes"
