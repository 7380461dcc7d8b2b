"""A step plan in the making."""

from collections.abc import Iterable
from dataclasses import replace

from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copies import NO_COPIES, BlockCopies
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_gpuworker.steps.time_budget import TimeBudget


class StepDraft:
    """Collects what a step will run, and keeps account of its budgets of tokens and time.

    Without ``time`` only tokens count.
    """

    def __init__(self, token_budget: int, time: TimeBudget | None = None) -> None:
        self.token_budget = token_budget
        self._time = time
        #: Who gave up its blocks to others that were running, and who its place to one that waited.
        self.preempted: list[Sequence] = []
        self.displaced: list[Sequence] = []
        self._items: dict[str, ScheduledSequence] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._items

    def room(self, start: int, wanted: int) -> int:
        """Return how many of ``wanted`` tokens from position ``start`` on the step can hold."""
        wanted = min(wanted, self.token_budget)
        if self._time is None:
            return wanted
        return self._time.most_tokens(start, wanted)

    def let_in(self, num_tokens: int) -> None:
        """Hold so many tokens more however little time there is."""
        if self._time is not None:
            self._time.let_in(num_tokens)

    def schedule(self, seq: Sequence, num_tokens: int) -> None:
        """Add the next ``num_tokens`` tokens of ``seq``."""
        item = ScheduledSequence(seq, seq.num_computed_tokens, num_tokens)
        self._items[seq.seq_id] = item
        self.token_budget -= num_tokens
        if self._time is not None:
            self._time.spend(item.start, num_tokens)

    def room_behind(self, seq: Sequence, wanted: int) -> int:
        """Return how many tokens more of a scheduled sequence the step can hold."""
        return self.room(self._items[seq.seq_id].end, wanted)

    def is_single(self, seq: Sequence) -> bool:
        """Whether exactly one token of ``seq`` is scheduled."""
        item = self._items.get(seq.seq_id)
        return item is not None and item.num_tokens == 1

    def append(self, seq: Sequence, drafted: tuple[int, ...]) -> None:
        """Add guesses behind the tokens of a scheduled sequence."""
        item = self._items[seq.seq_id]
        num_tokens = item.num_tokens + len(drafted)
        self._items[seq.seq_id] = replace(item, num_tokens=num_tokens, draft=drafted)
        self.token_budget -= len(drafted)
        if self._time is not None:
            self._time.spend(item.end, len(drafted))

    def withdraw(self, seq: Sequence) -> None:
        """Note that ``seq`` was preempted; if it was scheduled its tokens return to the budget.

        Its time does not: a step that preempts is short of blocks and not of time.
        """
        self.preempted.append(seq)
        item = self._items.pop(seq.seq_id, None)
        if item is not None:
            self.token_budget += item.num_tokens

    def plan(self, copies: BlockCopies = NO_COPIES) -> StepPlan:
        """Return the finished plan, single tokens first and otherwise in scheduling order."""
        scheduled = _decodes_first(self._items.values())
        return StepPlan(scheduled, (*self.displaced, *self.preempted), copies)


def _decodes_first(items: Iterable[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    return tuple(sorted(items, key=lambda item: item.num_tokens > 1))
