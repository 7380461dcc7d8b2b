"""The sequences of a worker that produce tokens, many of whose steps are taken at once."""

import math
from heapq import heappop, heappush

from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.simulation.sequence import Sequence


class DecodeBatch:
    """Ends its sequences by step number, so that a step costs nothing for those that go on."""

    def __init__(self, cost: StepCost) -> None:
        self._per_token, self._per_context = cost.per_token, cost.per_context
        self._base = cost.base
        self._ends: list[tuple[int, int, Sequence]] = []
        #: Steps taken so far.
        self.num_steps = 0
        #: Sequences that produce a token in each step.
        self.count = 0
        #: Those of them that somebody waits for: not of the batch class.
        self.num_prompt = 0
        #: Tokens that the next step attends to.
        self.context = 0

    def add(self, seq: Sequence) -> None:
        """Let a sequence go on that has produced its first token."""
        self.count += 1
        self.num_prompt += seq.priority_class < 2
        self.context += seq.input_tokens + 1
        heappush(self._ends, (self.num_steps + seq.output_tokens - 1, seq.number, seq))

    def cancel(self, seq: Sequence) -> None:
        """Take a sequence out in the middle."""
        entry = next(entry for entry in self._ends if entry[2] is seq)
        num_done = seq.output_tokens - 1 - (entry[0] - self.num_steps)
        self._ends.remove(entry)
        self._ends.sort()
        self._drop(seq, seq.input_tokens + 1 + num_done)

    def steps_to_end(self) -> int:
        """Return after how many steps the next sequence ends; the batch is not empty."""
        return self._ends[0][0] - self.num_steps

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
        self.num_steps += steps
        self.context += self.count * steps

    def pop_ended(self) -> list[Sequence]:
        """Take out the sequences that have produced all their tokens."""
        ended: list[Sequence] = []
        ends, now = self._ends, self.num_steps
        while ends and ends[0][0] <= now:
            seq = heappop(ends)[2]
            self._drop(seq, seq.input_tokens + seq.output_tokens)
            ended.append(seq)
        return ended

    def _drop(self, seq: Sequence, context: int) -> None:
        self.count -= 1
        self.num_prompt -= seq.priority_class < 2
        self.context -= context
