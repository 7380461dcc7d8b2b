"""The CPU tier: which contents that left the device are still in host memory."""

from collections import OrderedDict


class CpuTier:
    """Slots of host memory, each for the content of one KV block, found by its hash.

    What was used last is kept longest.  What a step reads or writes here is *busy* until the step
    has ended, and its slot is given to nobody else.  Decides only: ``BlockCopier`` copies.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # By hash, the least recently used first; so the busy ones are last.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._unused = list(range(num_slots - 1, -1, -1))
        self._busy: set[bytes] = set()
        self._unwritten: list[bytes] = []

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return len(self._slots)

    def find(self, block_hash: bytes) -> int | None:
        """Return the slot with this content, written by the step being planned at the latest."""
        return self._slots.get(block_hash)

    def use(self, block_hash: bytes) -> None:
        """Note that the step being planned reads this content."""
        self._slots.move_to_end(block_hash)
        self._busy.add(block_hash)

    def store(self, block_hash: bytes) -> int | None:
        """Return the slot that the step must copy this content to.

        None if it is here already, or if the step itself needs all the others.
        """
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        slot = self._take_slot()
        if slot is not None:
            self._slots[block_hash] = slot
            self._busy.add(block_hash)
            self._unwritten.append(block_hash)
        return slot

    def commit_step(self) -> None:
        """Note that the step has run, copies included."""
        self._busy.clear()
        self._unwritten.clear()

    def rollback_step(self) -> None:
        """Forget what the failed step was to copy here: nobody knows how far it got."""
        for block_hash in self._unwritten:
            self._unused.append(self._slots.pop(block_hash))
        self.commit_step()

    def check_integrity(self) -> None:
        """Assert that each slot is unused or holds one content."""
        slots = [*self._unused, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert self._busy <= self._slots.keys(), "a step needs what is not here"

    def _take_slot(self) -> int | None:
        if self._unused:
            return self._unused.pop()
        if len(self._busy) == len(self._slots):
            return None
        oldest = next(block_hash for block_hash in self._slots if block_hash not in self._busy)
        return self._slots.pop(oldest)
