"""The rules of the block manager, written as naively as possible: the other side of a comparison.

Blocks know the complete token history they stand for, lookups compare histories one by one, and
free blocks are a plain list.  No hashes, no reference counts, no index.
"""

from dataclasses import dataclass, field

History = tuple[str | int, ...]


@dataclass
class NaiveBlock:
    """A block: whose it is, and the salt and tokens it ends, if lookups may find it.

    It is watched if somebody waited for a sequence that held it.
    """

    holders: list[str] = field(default_factory=list)
    history: History | None = None
    published_at: int = 0
    computed: bool = True
    watched: bool = False


class NaiveBlocks:
    """Block tables by sequence id; every answer is found by walking over everything."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [NaiveBlock() for _ in range(num_blocks)]
        self.free_list = list(range(num_blocks))
        self.tables: dict[str, list[int]] = {}
        self._num_published = 0

    def longest_prefix(self, salt: str, tokens: list[int]) -> list[int]:
        """Blocks whose histories begin ``tokens``, always leaving one token to compute."""
        found: list[int] = []
        while True:
            end = (len(found) + 1) * self.block_size
            candidates = [
                (block.published_at, number)
                for number, block in enumerate(self.blocks)
                if block.history == (salt, *tokens[:end])
            ]
            if end >= len(tokens) or not candidates:
                return found
            found.append(min(candidates)[1])

    def hold(self, seq_id: str, blocks: list[int]) -> None:
        """Add existing blocks to a table."""
        for number in blocks:
            self.blocks[number].holders.append(seq_id)
            if number in self.free_list:
                self.free_list.remove(number)
        self.tables.setdefault(seq_id, []).extend(blocks)

    def extend(self, seq_id: str, salt: str, tokens: list[int], start: int, end: int) -> bool:
        """Make room for tokens ``start`` to ``end`` and publish the blocks they complete."""
        table = self.tables.setdefault(seq_id, [])
        wanted = 0
        while (len(table) + wanted) * self.block_size < end:
            wanted += 1
        if wanted > len(self.free_list):
            return False
        for number in self.free_list[:wanted]:
            self.blocks[number].history, self.blocks[number].watched = None, False
            self.hold(seq_id, [number])
        for index, number in enumerate(table):
            if start < (index + 1) * self.block_size <= end:
                self._publish(self.blocks[number], (salt, *tokens[: (index + 1) * self.block_size]))
        return True

    def drop(self, seq_id: str, *, is_batch: bool) -> None:
        """Take everything from a sequence; what it promised and did not compute is forgotten."""
        useless = []
        is_watched = not is_batch
        for number in reversed(self.tables.pop(seq_id, [])):
            block = self.blocks[number]
            is_watched = block.watched = block.watched or is_watched
            block.holders.remove(seq_id)
            if block.holders:
                continue
            if not block.computed:
                block.history, block.computed = None, True
            if block.history is None:
                block.watched = False
                useless.append(number)
            else:
                self._rest(number)
        self.free_list = useless + self.free_list

    def step_ended(self) -> None:
        """All promises are kept."""
        for block in self.blocks:
            block.computed = True

    def step_failed(self) -> None:
        """All promises are broken."""
        for block in self.blocks:
            if not block.computed:
                block.history, block.computed, block.watched = None, True, False

    def _rest(self, number: int) -> None:
        """The watched ones are the end of the list; where it is half of all, its first falls."""
        watched = [other for other in self.free_list if self.blocks[other].watched]
        if self.blocks[number].watched:
            self.free_list.append(number)
            watched.append(number)
            if len(watched) > len(self.blocks) // 2:
                self.blocks[watched[0]].watched = False
        else:
            self.free_list.insert(len(self.free_list) - len(watched), number)

    def _publish(self, block: NaiveBlock, history: History) -> None:
        self._num_published += 1
        block.history, block.published_at, block.computed = history, self._num_published, False
