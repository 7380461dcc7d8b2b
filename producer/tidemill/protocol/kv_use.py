"""How well a worker's KV cache is used: the figures of waste."""

from tidemill.protocol.wire_model import Natural, WireModel


class KvUse(WireModel):
    """Blocks and slots of a KV cache between two steps, and what was moved since the start.

    A block has as many slots as the block size, each for the KV entry of one token.  Of the
    ``used_blocks`` that sequences hold, ``empty_slots`` hold no entry yet; ``most_empty_slots`` is
    the largest number of them that a single sequence has.  ``cached_blocks`` are held by nobody,
    but their prefixes can still be found.
    """

    num_blocks: Natural = 0
    block_size: Natural = 0
    used_blocks: Natural = 0
    cached_blocks: Natural = 0
    empty_slots: Natural = 0
    most_empty_slots: Natural = 0
    swap_blocks: Natural = 0
    used_swap_blocks: Natural = 0
    swapped_out: Natural = 0
    swapped_in: Natural = 0
    forked: Natural = 0
    evicted: Natural = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and that hold nothing."""
        return self.num_blocks - self.used_blocks - self.cached_blocks

    @property
    def num_tokens(self) -> int:
        """KV entries in the blocks that sequences hold; what they share counts once."""
        return self.used_blocks * self.block_size - self.empty_slots

    @property
    def utilisation(self) -> float:
        """Share of the slots in held blocks that have an entry; 1 if none is held."""
        slots = self.used_blocks * self.block_size
        return self.num_tokens / slots if slots else 1.0
