"""What a worker learns about the duration of its own steps."""

from collections import deque

from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill.service.step_fit import fit_step_cost

#: Steps of each kind that are remembered: decodes alone, however many, must not push out what is
#: known of prefills.
WINDOW = 128
#: Steps before the first fit, and between two fits: one takes a few milliseconds.
FIRST_FIT = 50
REFIT_EVERY = 256

_UNMEASURED = StepCost()


class CostLearner:
    """Fits a ``StepCost`` to the latest steps, again after every few hundred."""

    def __init__(self) -> None:
        #: The latest fit, None before the first one.
        self.fitted: StepCost | None = None
        self._prefills: deque[StepFeatures] = deque(maxlen=WINDOW)
        self._decodes: deque[StepFeatures] = deque(maxlen=WINDOW)
        self._num_until_fit = FIRST_FIT

    @property
    def cost(self) -> StepCost:
        """The best known cost: before the first fit, one that nobody measured."""
        return self.fitted or _UNMEASURED

    def observe(self, step: StepFeatures) -> None:
        """Learn from a step that has run."""
        (self._prefills if step.prefill_tokens else self._decodes).append(step)
        self._num_until_fit -= 1
        if not self._num_until_fit:
            self._num_until_fit = REFIT_EVERY
            self.fitted = fit_step_cost([*self._prefills, *self._decodes], self.cost)
