"""The sequences of a worker that produce tokens, many of whose steps are taken at once."""

import math
from heapq import heappop, heappush

from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.simulation.sequence import Sequence

_BATCH_CLASS = 2


class _Group:
    """Sequences that take every step together; its sums hold whether it takes the next or not."""

    __slots__ = ("context", "count", "ends", "num_steps")

    def __init__(self) -> None:
        self.ends: list[tuple[int, int, Sequence]] = []
        self.num_steps = 0
        self.count = 0
        self.context = 0

    def advance(self, steps: int) -> None:
        """Take so many steps."""
        self.num_steps += steps
        self.context += self.count * steps


class DecodeBatch:
    """Ends its sequences by step number, so that a step costs nothing for those that go on.

    Those of the batch class can be left out of steps.
    """

    __slots__ = (
        "_base",
        "_bulk",
        "_groups",
        "_per_context",
        "_per_token",
        "_watched",
        "context",
        "count",
        "is_paused",
        "num_paused_steps",
        "num_prompt",
    )

    def __init__(self, cost: StepCost) -> None:
        self._per_token, self._per_context = cost.per_token, cost.per_context
        self._base = cost.base
        self._watched, self._bulk = _Group(), _Group()
        self._groups = (self._watched, self._bulk)
        #: Whether the next step leaves the batch class out, and how many before it did, in a row.
        self.is_paused = False
        self.num_paused_steps = 0
        #: Sequences that produce a token in the next step.
        self.count = 0
        #: Those of them that somebody waits for: not of the batch class.
        self.num_prompt = 0
        #: Tokens that the next step attends to.
        self.context = 0

    def pause(self, most: int) -> None:
        """Leave the batch class out of the next step, unless the last ``most`` steps did so."""
        if self._bulk.count and not self.is_paused and self.num_paused_steps < most:
            self.is_paused = True
            self.count -= self._bulk.count
            self.context -= self._bulk.context

    def resume(self) -> None:
        """Let the next step serve all classes again."""
        if self.is_paused:
            self.is_paused = False
            self.count += self._bulk.count
            self.context += self._bulk.context

    def add(self, seq: Sequence) -> None:
        """Let a sequence go on that has produced its first token."""
        group = self._group_of(seq)
        heappush(group.ends, (group.num_steps + seq.output_tokens - 1, seq.number, seq))
        self._count(group, 1, seq.input_tokens + 1)

    def cancel(self, seq: Sequence) -> None:
        """Take a sequence out in the middle."""
        group = self._group_of(seq)
        entry = next(entry for entry in group.ends if entry[2] is seq)
        num_done = seq.output_tokens - 1 - (entry[0] - group.num_steps)
        group.ends.remove(entry)
        group.ends.sort()
        self._count(group, -1, -(seq.input_tokens + 1 + num_done))

    def steps_to_end(self) -> int:
        """Return after how many steps the next sequence ends; none is paused, one is there."""
        return min(group.ends[0][0] - group.num_steps for group in self._groups if group.ends)

    def seconds(self, steps: int) -> float:
        """Return how long so many steps take while nothing else happens.

        The context grows by one token for each sequence and step.
        """
        first = self._base + self._per_token * self.count + self._per_context * self.context
        growth = self._per_context * self.count
        return steps * first + growth * (steps * (steps - 1) // 2)

    def steps_within(self, seconds: float) -> int:
        """Return after how many whole steps so much time has passed, at least 1."""
        first = self._base + self._per_token * self.count + self._per_context * self.context
        half = self._per_context * self.count / 2
        steps = seconds / first
        if half > 0:
            linear = first - half
            steps = (math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half)
        count = max(1, math.ceil(steps))
        # The root is rounded; what counts is the sum of the steps.
        while count > 1 and self.seconds(count - 1) >= seconds:
            count -= 1
        while self.seconds(count) < seconds:
            count += 1
        return count

    def advance(self, steps: int) -> None:
        """Let so many steps pass; no sequence may end before the last of them."""
        self.num_paused_steps = self.num_paused_steps + steps if self.is_paused else 0
        self.context += self.count * steps
        self._watched.advance(steps)
        if not self.is_paused:
            self._bulk.advance(steps)

    def pop_ended(self) -> list[Sequence]:
        """Take out the sequences that have produced all their tokens."""
        ended: list[Sequence] = []
        for group in self._groups:
            ends = group.ends
            while ends and ends[0][0] <= group.num_steps:
                seq = heappop(ends)[2]
                self._count(group, -1, -(seq.input_tokens + seq.output_tokens))
                ended.append(seq)
        return ended

    def _group_of(self, seq: Sequence) -> _Group:
        return self._bulk if seq.priority_class == _BATCH_CLASS else self._watched

    def _count(self, group: _Group, sequences: int, context: int) -> None:
        group.count += sequences
        group.context += context
        if group is self._watched:
            self.num_prompt += sequences
        elif self.is_paused:
            return
        self.count += sequences
        self.context += context
