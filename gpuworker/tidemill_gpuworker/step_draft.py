"""A step plan in the making."""

from collections.abc import Iterable

from tidemill_gpuworker.sequence import Sequence
from tidemill_gpuworker.step_plan import ScheduledSequence, StepPlan


class StepDraft:
    """Collects what a step will run, and keeps account of its token budget."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.preempted: list[Sequence] = []
        self._items: dict[str, ScheduledSequence] = {}

    def schedule(self, seq: Sequence, num_tokens: int) -> None:
        """Add the next ``num_tokens`` tokens of ``seq``."""
        self._items[seq.seq_id] = ScheduledSequence(seq, seq.num_computed_tokens, num_tokens)
        self.token_budget -= num_tokens

    def withdraw(self, seq: Sequence) -> None:
        """Note that ``seq`` was preempted; if it was scheduled its tokens return to the budget."""
        self.preempted.append(seq)
        item = self._items.pop(seq.seq_id, None)
        if item is not None:
            self.token_budget += item.num_tokens

    def plan(self) -> StepPlan:
        """Return the finished plan, single tokens first and otherwise in scheduling order."""
        return StepPlan(_decodes_first(self._items.values()), tuple(self.preempted))


def _decodes_first(items: Iterable[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    return tuple(sorted(items, key=lambda item: item.num_tokens > 1))
