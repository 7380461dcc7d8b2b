"""Memory as a device sees it: what each cell of each block holds, after every copy and write.

A cell holds the whole history that its KV entry stands for.  So it shows whether a block table
leads to the right entries, whoever shared, evicted, copied or overwrote what in between.  No
hashes, no reference counts, no order of reuse.
"""

from dataclasses import dataclass, field

from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copies import BlockCopies
from tidemill_gpuworker.memory.places import NO_BLOCK

History = tuple[str | int, ...]
Cells = list[History | None]

GARBAGE: History = ("garbage",)


def history_of(seq: Sequence, length: int) -> History:
    """The salt and the first tokens of a sequence."""
    salt = seq.extra_keys[0][1] if seq.extra_keys else ""
    return (salt, *seq.token_slice(0, length))


@dataclass
class PhysicalBlocks:
    """Blocks of a device and slots of its CPU tier, cell by cell."""

    num_blocks: int
    block_size: int
    blocks: list[Cells] = field(init=False)
    slots: dict[int, Cells] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = [[None] * self.block_size for _ in range(self.num_blocks)]

    def copy(self, copies: BlockCopies) -> None:
        """Carry out the copies of a step."""
        for copy in copies.outs:
            self.slots[copy.target] = list(self.blocks[copy.source])
        before = [list(cells) for cells in self.blocks]
        for copy in copies.forks:
            self.blocks[copy.target] = list(before[copy.source])
        for copy in copies.ins:
            self.blocks[copy.target] = list(self.slots[copy.source])

    def spoil(self, copies: BlockCopies) -> None:
        """Leave garbage wherever the copies of a failed step may have written."""
        for copy in copies.outs:
            self.slots[copy.target] = [GARBAGE] * self.block_size
        for copy in (*copies.forks, *copies.ins):
            self.blocks[copy.target] = [GARBAGE] * self.block_size

    def write(self, seq: Sequence, start: int, end: int, *, spoils: bool = False) -> None:
        """Compute the tokens at some positions of a sequence."""
        for position in range(start, end):
            index, offset = divmod(position, self.block_size)
            entry = GARBAGE if spoils else history_of(seq, position + 1)
            self.blocks[seq.block_table[index]][offset] = entry

    def check(self, seq: Sequence, num_computed: int, window: int | None) -> None:
        """Assert that the table of ``seq`` leads to all entries that its next token reads."""
        first = 0 if window is None else max(0, num_computed - window + 1)
        for position in range(first, num_computed):
            index, offset = divmod(position, self.block_size)
            block = seq.block_table[index]
            assert block != NO_BLOCK, f"the block of position {position} is gone too early"
            assert self.blocks[block][offset] == history_of(seq, position + 1)
