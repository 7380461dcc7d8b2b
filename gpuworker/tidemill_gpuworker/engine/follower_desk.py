"""Sequences that wait for another one to compute the prompt that they share."""

from collections.abc import Sequence as Several
from typing import Any

from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.steps.step_plan import ScheduledSequence


class FollowerDesk:
    """Draws first tokens for followers from the row of logits of the sequence that they follow."""

    def __init__(self) -> None:
        self._drawn: list[tuple[Sequence, Sequence, SampledToken]] = []

    def sample(self, sampler: Any, logits: Any, sampling: Several[ScheduledSequence]) -> None:
        """Draw for all whose leaders get their first token from this step.

        ``logits`` has a row for each of ``sampling`` and for each token that was drafted for it.
        """
        self._drawn, row = [], 0
        for item in sampling:
            for follower in item.seq.followers:
                [token] = sampler.sample(logits[row : row + 1], [follower])
                self._drawn.append((item.seq, follower, token))
            row += 1 + len(item.draft)

    def take(self) -> list[tuple[Sequence, Sequence, SampledToken]]:
        """Return (leader, follower, token) of the step, once; the leaders lead nobody any more."""
        drawn, self._drawn = self._drawn, []
        for leader, _, _ in drawn:
            leader.followers = []
        return drawn
