"""Free KV blocks in the order of their reuse: first what nobody waited for."""

from collections import OrderedDict
from collections.abc import Iterator

#: Share of all blocks that are reused after those that only batch sequences held.
WATCHED_SHARE = 0.5


class FreeBlocks:
    """Least recently used first, but blocks that only batch sequences held before all others.

    A block that was released for a sequence that somebody waited for is *watched*, and so are those
    before it in every table.  At most ``WATCHED_SHARE`` of all blocks are free and watched: what is
    beyond falls back, the least recently used first, and is then reused as if a batch sequence had
    released it at that moment.  So cold prefixes take no more than that from batch work, and
    without batch sequences nothing but the last use counts.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most_watched = int(WATCHED_SHARE * num_blocks)
        self._batch: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._watched: OrderedDict[int, None] = OrderedDict()
        # By block, free or not.
        self._is_watched = bytearray(num_blocks)

    def __len__(self) -> int:
        return len(self._batch) + len(self._watched)

    def __iter__(self) -> Iterator[int]:
        yield from self._batch
        yield from self._watched

    def __contains__(self, block: int) -> bool:
        return block in self._batch or block in self._watched

    def watch(self, block: int) -> None:
        """Note that somebody waited for what ``block``, which is not free, contains."""
        self._is_watched[block] = True

    def forget(self, block: int) -> None:
        """Note that ``block``, which is not free, contains that no more."""
        self._is_watched[block] = False

    def is_watched(self, block: int) -> bool:
        """Whether somebody waited for what ``block`` contains, and it did not fall back since."""
        return bool(self._is_watched[block])

    def append(self, block: int) -> None:
        """Take in a block, to be reused after the others of its kind."""
        (self._watched if self._is_watched[block] else self._batch)[block] = None
        if len(self._watched) > self._most_watched:
            fallen = self._watched.popitem(last=False)[0]
            self._is_watched[fallen] = False
            self._batch[fallen] = None

    def prepend(self, block: int) -> None:
        """Take in a block without content, to be reused before all others."""
        self._is_watched[block] = False
        self._batch[block] = None
        self._batch.move_to_end(block, last=False)

    def pop(self) -> int:
        """Take out the block that is reused next."""
        return (self._batch or self._watched).popitem(last=False)[0]

    def discard(self, block: int) -> bool:
        """Take out a block; returns whether it was here."""
        if block in self._batch:
            del self._batch[block]
        elif block in self._watched:
            del self._watched[block]
        else:
            return False
        return True

    def check_integrity(self) -> None:
        """Assert that each block is in the list it belongs to."""
        for block in self._batch:
            assert not self._is_watched[block], f"watched block {block} goes before its turn"
        for block in self._watched:
            assert self._is_watched[block], f"block {block} is kept without a reason"
        assert len(self._watched) <= self._most_watched, "too many blocks are watched"
