"""Which batch sequences give up their places to interactive ones when all places are taken."""

from collections.abc import Iterable

from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.waiting_queue import urgency


class SlotPreemption:
    """Finds a place for each interactive sequence that the next step could begin.

    Nothing thrashes: a place is only taken for a sequence whose blocks are free, or are those that
    the victim alone holds, and from no sequence that was preempted ``max_displacements`` times.
    """

    def __init__(self, config: StepConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks

    def choose(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
        """Return the victims among ``running``; ``waiting`` are the interactive ones in order."""
        held = list(running)
        victims = sorted((seq for seq in held if self._may_yield(seq)), key=urgency)
        num_slots = self._config.max_num_seqs - len(held)
        num_tokens = self._config.max_num_batched_tokens
        num_tokens -= sum(seq.num_uncomputed_tokens for seq in held if seq.priority < 0)
        num_blocks = self._blocks.num_free_blocks - self._blocks.num_watermark_blocks
        chosen: list[Sequence] = []
        for seq in waiting:
            if num_tokens <= 0:
                break
            if num_slots <= 0:
                if not victims:
                    break
                num_blocks += self._blocks.num_blocks_held_alone(victims[-1])
            num_cached = self._blocks.count_prefix(seq)
            num_blocks -= self._blocks.num_blocks_for(seq.num_tokens) - num_cached
            if num_blocks < 0:
                break
            if num_slots <= 0:
                chosen.append(victims.pop())
            num_slots -= num_slots > 0
            num_tokens -= seq.num_tokens - num_cached * self._blocks.block_size
        return chosen

    def _may_yield(self, seq: Sequence) -> bool:
        is_batch = seq.priority_class is PriorityClass.BATCH
        return is_batch and seq.num_preemptions < self._config.max_displacements
