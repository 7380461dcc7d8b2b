"""Copies of whole KV blocks that a step makes before it computes anything."""

from dataclasses import dataclass

from tidemill_gpuworker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The content of ``source`` goes to ``target``: blocks of the device, or slots of the tier."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """What moves, in this order, so that nothing is overwritten before it was read.

    ``outs`` go from device blocks to slots of the CPU tier, ``forks`` from block to block on the
    device, all of them read before one is written, ``ins`` from slots to blocks.
    """

    outs: tuple[BlockCopy, ...] = ()
    forks: tuple[BlockCopy, ...] = ()
    ins: tuple[BlockCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.outs or self.forks or self.ins)


NO_COPIES = BlockCopies()


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence's own copy of a block that it wrote to while others held it too."""

    seq: Sequence
    index: int
    source: int
    target: int


class CopyLedger:
    """The copies of the step being planned.

    The source of a fork stays referenced until the step has run, so that a failed step can give it
    back to its sequence.
    """

    def __init__(self) -> None:
        # By target, which has one source.
        self._outs: dict[int, int] = {}
        self._ins: dict[int, int] = {}
        self._forks: list[Fork] = []
        #: Blocks that steps copied to the CPU tier, back, and on write, since the start.
        self.num_outs = 0
        self.num_ins = 0
        self.num_forks = 0

    @property
    def forks(self) -> tuple[Fork, ...]:
        """The copies on write."""
        return tuple(self._forks)

    def copies(self) -> BlockCopies:
        """Return all copies as the model runner takes them."""
        if not (self._outs or self._ins or self._forks):
            return NO_COPIES
        return BlockCopies(
            outs=tuple(BlockCopy(block, slot) for slot, block in self._outs.items()),
            forks=tuple(BlockCopy(fork.source, fork.target) for fork in self._forks),
            ins=tuple(BlockCopy(slot, block) for block, slot in self._ins.items()),
        )

    def copy_out(self, block: int, slot: int) -> None:
        """Copy a block's content to the CPU tier."""
        self._outs[slot] = block

    def copy_in(self, slot: int, block: int) -> None:
        """Copy a content of the CPU tier back to a block."""
        self._ins[block] = slot

    def cancel_in(self, block: int) -> None:
        """Copy nothing to ``block`` after all."""
        self._ins.pop(block, None)

    def fork(self, fork: Fork) -> None:
        """Copy a block for a sequence that writes to it."""
        self._forks.append(fork)

    def num_forks_from(self, block: int) -> int:
        """Return how many references to ``block`` only keep it for the copies."""
        return sum(fork.source == block for fork in self._forks)

    def cancel_forks(self, seq: Sequence) -> list[int]:
        """Drop the copies for ``seq``; returns their sources, whose references end."""
        dropped = [fork.source for fork in self._forks if fork.seq is seq]
        if dropped:
            self._forks = [fork for fork in self._forks if fork.seq is not seq]
        return dropped

    def commit_step(self) -> None:
        """Count the copies, which the step has made, and begin the next step."""
        self.num_outs += len(self._outs)
        self.num_ins += len(self._ins)
        self.num_forks += len(self._forks)
        self.clear()

    def clear(self) -> None:
        """Begin the next step."""
        self._outs.clear()
        self._ins.clear()
        self._forks.clear()
