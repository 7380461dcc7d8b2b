"""How long a step may take while somebody reads along."""

import math

from tidemill.protocol.step_cost import StepCost
from tidemill_gpuworker.steps.step_features import prefill_pairs

#: More tokens than any step holds.
_MANY = 1e9


class TimeBudget:
    """The predicted seconds that a step has left, and how many tokens fit into them.

    The first ``least_tokens`` tokens of a step are let in however little time there is: its
    decodes, and some of a prefill, so that prefills get on.
    """

    def __init__(self, cost: StepCost, seconds: float, least_tokens: int) -> None:
        self._cost = cost
        self._seconds = seconds - cost.base
        self._least_tokens = least_tokens

    def let_in(self, num_tokens: int) -> None:
        """Let so many tokens more in however little time there is."""
        self._least_tokens += num_tokens

    def spend(self, start: int, num_tokens: int) -> None:
        """Take off the tokens of a sequence from position ``start`` on."""
        self._seconds -= self._takes(start, num_tokens)
        self._least_tokens = max(0, self._least_tokens - num_tokens)

    def most_tokens(self, start: int, wanted: int) -> int:
        """Return how many of ``wanted`` tokens from position ``start`` on fit."""
        if wanted <= self._least_tokens:
            return wanted
        return min(wanted, max(self._least_tokens, self._fitting(start)))

    def _takes(self, start: int, num_tokens: int) -> float:
        cost = self._cost
        if num_tokens == 1:
            # Decoded or not, that is how it is computed.
            return cost.per_token + cost.per_context * (start + 1)
        return cost.per_token * num_tokens + cost.per_pair * prefill_pairs(start, num_tokens)

    def _fitting(self, start: int) -> int:
        if self._seconds <= 0:
            return 0
        # n tokens cost per_token n + per_pair (n start + n (n - 1) / 2), a parabola in n.
        square = self._cost.per_pair / 2
        linear = self._cost.per_token + self._cost.per_pair * (start - 0.5)
        # In this form of the root nothing is divided by the square, which may be zero.
        root = linear + math.sqrt(linear * linear + 4 * square * self._seconds)
        most = min(2 * self._seconds / root, _MANY) if root > 0 else _MANY
        return int(most) if most >= 2 else int(self._takes(start, 1) <= self._seconds)
