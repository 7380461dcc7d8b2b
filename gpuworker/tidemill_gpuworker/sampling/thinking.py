"""How far a sequence has used up the tokens that it may reason with."""

from collections.abc import Sequence as Several
from typing import NamedTuple


class ReasoningMarkers(NamedTuple):
    """The tokens that begin and end a model's reasoning."""

    open: int
    close: int


class ThinkingBudget:
    """Where the reasoning of one sequence began, kept up to date as its output grows.

    Only what is new since the last call is looked at.  As in vLLM the reasoning is what follows an
    opening marker, in the prompt or the output, as long as no closing one follows; each new one
    has the whole budget.
    """

    def __init__(self, markers: ReasoningMarkers, budget: int, prompt_ids: Several[int]) -> None:
        self.close = markers.close
        self._open = markers.open
        self._budget = budget
        self._num_prompt_tokens = len(prompt_ids)
        self._num_seen = 0
        #: Position of the first token of reasoning, None outside of it.
        self._start = self._scan(prompt_ids, 0, None)

    def copy(self) -> "ThinkingBudget":
        """Return one that goes its own way."""
        twin = ThinkingBudget(ReasoningMarkers(self._open, self.close), self._budget, ())
        twin._num_prompt_tokens, twin._num_seen = self._num_prompt_tokens, self._num_seen
        twin._start = self._start
        return twin

    def is_spent(self, output_ids: Several[int]) -> bool:
        """Whether the reasoning must end now; ``output_ids`` is everything generated so far."""
        first = self._num_prompt_tokens + self._num_seen
        self._start = self._scan(output_ids[self._num_seen :], first, self._start)
        self._num_seen = len(output_ids)
        if self._start is None:
            return False
        return self._num_prompt_tokens + self._num_seen - self._start >= self._budget

    def _scan(self, ids: Several[int], first: int, start: int | None) -> int | None:
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] == self._open:
                return first + place + 1
            if ids[place] == self.close:
                return None
        return start
