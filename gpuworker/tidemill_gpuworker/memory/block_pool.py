"""Physical KV blocks: who holds them, which may be reused, and what full ones contain."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_gpuworker.memory.free_blocks import FreeBlocks
from tidemill_gpuworker.memory.hints import Hints
from tidemill_gpuworker.memory.kept_chains import KeptChains
from tidemill_gpuworker.memory.routing_index import RoutingIndex

#: A hint lapses when all blocks were taken so often since it was last given: whoever gave it may
#: be gone.
_HINT_TURNS = 4


class BlockPool:
    """Reference counts, free list and prefix index of ``num_blocks`` blocks.

    A block is free when nobody references it.  A free block keeps its hash, and can be found by
    it, until the block is taken again: eviction is lazy.  The free list is in order of reuse, what
    only batch sequences held before the rest; behind it come the free blocks of prefixes that
    waiting jobs will use, from their tails on.

    ``on_evict`` is told of each block whose content leaves the cache with it, and of the hash.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None
    ) -> None:
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # Two sequences can compute the same block at a time; both stay, the older one is found.
        self._blocks_by_hash: dict[bytes, list[int]] = {}
        self._parents: list[bytes | None] = [None] * num_blocks
        self._is_routing = bytearray(num_blocks)
        self._free = FreeBlocks(num_blocks)
        self._kept_free: OrderedDict[int, None] = OrderedDict()
        self.routing = RoutingIndex()
        self._kept = KeptChains(self._parent_of)
        self._hints = Hints(lifetime=_HINT_TURNS * num_blocks)
        self._num_taken = 0
        self.num_evictions = 0
        #: Free blocks whose content a lookup can find.
        self.num_cached_free_blocks = 0

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references."""
        return len(self._free) + len(self._kept_free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free blocks, the next one to be taken first."""
        return (*self._free, *self._kept_free)

    @property
    def num_cached_hashes(self) -> int:
        """Distinct block contents that a lookup can find."""
        return len(self._blocks_by_hash)

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash of the content that ``block`` is published with."""
        return self._hashes[block]

    def ref_count(self, block: int) -> int:
        """Return how many block tables hold ``block``."""
        return self._ref_counts[block]

    def is_free(self, block: int) -> bool:
        """Whether nobody references ``block``."""
        return block in self._free or block in self._kept_free

    def find(self, block_hash: bytes) -> int | None:
        """Return a block with this content, free or not."""
        blocks = self._blocks_by_hash.get(block_hash)
        return blocks[0] if blocks else None

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks with one reference each, and forget what they contained."""
        assert count <= self.num_free_blocks, "the caller checks num_free_blocks"
        self._num_taken += count
        for digest in self._hints.lapsed(self._num_taken):
            self._drop(digest)
        taken: list[int] = []
        free, hashes = self._free, self._hashes
        for _ in range(count):
            block = free.pop() if free else self._pop_kept()
            self._ref_counts[block] = 1
            if (block_hash := hashes[block]) is not None:
                self.num_cached_free_blocks -= 1
                if self._on_evict is not None and len(self._blocks_by_hash[block_hash]) == 1:
                    self._on_evict(block, block_hash)
                self.unpublish(block)
                self.num_evictions += 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; free ones leave the free list."""
        for block in blocks:
            self._ref_counts[block] += 1
            if self._ref_counts[block] == 1:
                self.num_cached_free_blocks -= self._hashes[block] is not None
                if not self._free.discard(block):
                    del self._kept_free[block]

    def release(self, blocks: Sequence[int], *, is_batch: bool = False) -> None:
        """Drop one reference to each block of a table, which was a batch sequence's or not.

        The table is walked from its tail, so the tail of a prefix is evicted before its head.
        Blocks without a hash are of no use to anybody and go to the front of the free list.
        """
        free = self._free
        useless: list[int] = []
        is_watched = not is_batch
        for block in reversed(blocks):
            # A head is not worth less than its tail, though the tail may hang on another copy too.
            is_watched = is_watched or free.is_watched(block)
            if is_watched:
                free.watch(block)
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._rest(block, useless)
        for block in reversed(useless):
            free.prepend(block)

    def publish(
        self,
        block: int,
        block_hash: bytes,
        parent: bytes | None = None,
        is_routing: bool = False,
    ) -> None:
        """Let lookups find ``block`` under the hash of its content.

        ``parent`` is the hash before it in its chain; ``is_routing`` tells whether the scheduler
        is to know that this one is here.
        """
        assert self._hashes[block] is None, f"block {block} is published twice"
        self._hashes[block] = block_hash
        self._parents[block] = parent
        self._is_routing[block] = is_routing
        same = self._blocks_by_hash.get(block_hash)
        if same is not None:
            same.append(block)
            return
        self._blocks_by_hash[block_hash] = [block]
        if is_routing:
            self.routing.add(block_hash)
            if block_hash[:ROUTING_HASH_BYTES] in self._hints:
                self._keep(block_hash)

    def unpublish(self, block: int) -> None:
        """Hide a published block from lookups."""
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} was never published"
        self._hashes[block] = None
        self._free.forget(block)
        blocks = self._blocks_by_hash[block_hash]
        blocks.remove(block)
        if not blocks:
            del self._blocks_by_hash[block_hash]
            if self._is_routing[block]:
                self.routing.discard(block_hash)
                if self._kept.reasons:
                    self._leave(self._kept.drop(block_hash))

    def hint(self, refs: Mapping[bytes, int]) -> None:
        """Note how many waiting jobs will use the prefix up to each routing hash, 0 for none.

        What is hinted is evicted after everything else, whether it is here already or comes later.
        """
        for digest, num_jobs in refs.items():
            if not num_jobs:
                self._hints.forget(digest)
                self._drop(digest)
                continue
            forgotten = self._hints.note(digest, self._num_taken)
            if forgotten is not None:
                self._drop(forgotten)
            if (block_hash := self.routing.find(digest)) is not None:
                self._keep(block_hash)

    def check_integrity(self) -> None:
        """Assert that free list, reference counts and prefix index tell the same story."""
        unreferenced = {block for block, count in enumerate(self._ref_counts) if count == 0}
        self._free.check_integrity()
        listed = [*self._free, *self._kept_free]
        assert len(listed) == len(set(listed)), "a block is free twice"
        assert unreferenced == set(listed), "the free list is not the set of unreferenced ones"
        num_cached = sum(self._hashes[block] is not None for block in listed)
        assert num_cached == self.num_cached_free_blocks, "the count of cached blocks is off"
        for block in listed:
            is_kept = self._hashes[block] in self._kept.reasons
            assert is_kept == (block in self._kept_free), f"block {block} waits in the wrong list"
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

    def _pop_kept(self) -> int:
        # A tail first: prefixes must not lose their heads.  Where the chain goes on in blocks that
        # are in use, the same content is there too, and this copy can go.
        for _ in range(len(self._kept_free)):
            block = next(iter(self._kept_free))
            block_hash = self._hashes[block]
            assert block_hash is not None, f"block {block} is kept without content"
            if not self._kept.has_kept_child(block_hash):
                break
            self._kept_free.move_to_end(block)
        return self._kept_free.popitem(last=False)[0]

    def _parent_of(self, block_hash: bytes) -> bytes | None:
        blocks = self._blocks_by_hash.get(block_hash)
        return self._parents[blocks[0]] if blocks else None

    def _rest(self, block: int, useless: list[int]) -> None:
        block_hash = self._hashes[block]
        self.num_cached_free_blocks += block_hash is not None
        if block_hash is None:
            useless.append(block)
        elif block_hash in self._kept.reasons:
            self._kept_free[block] = None
        else:
            self._free.append(block)

    def _keep(self, block_hash: bytes) -> None:
        for block in self._blocks_of(self._kept.keep(block_hash)):
            if self._free.discard(block):
                self._kept_free[block] = None

    def _drop(self, digest: bytes) -> None:
        if (block_hash := self.routing.find(digest)) is not None:
            self._leave(self._kept.drop(block_hash))

    def _leave(self, hashes: Iterable[bytes]) -> None:
        for block in self._blocks_of(hashes):
            if block in self._kept_free:
                del self._kept_free[block]
                self._free.append(block)

    def _blocks_of(self, hashes: Iterable[bytes]) -> Iterable[int]:
        return chain.from_iterable(self._blocks_by_hash.get(key, ()) for key in hashes)
