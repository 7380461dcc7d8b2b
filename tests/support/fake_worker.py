"""A worker process with the fake model, for crash tests.

Usage: ``python -m support.fake_worker URL [SECONDS_PER_STEP]``.
"""

import sys
import time
from collections.abc import Iterable

from support.worker_rig import FAST, PacedRunner, Rig
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill.service.redis import connect
from tidemill.service.runtime import Drain
from tidemill_gpuworker.steps.cost_learner import CostLearner
from tidemill_gpuworker.steps.step_plan import StepPlan

#: What a step of the pretended model takes, so that a test can act in mid-stream.
_STEP_SECONDS = 0.005


class SlowRunner(PacedRunner):
    """Computes every step, but not at once."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self._step_seconds = step_seconds

    def execute(self, plan: StepPlan) -> list[int]:
        """Pretend to compute."""
        time.sleep(self._step_seconds)
        return super().execute(plan)


class SettledLearner(CostLearner):
    """Knows what steps cost, and does not believe what they take here: the same with any tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.fitted = StepCost()

    def observe(self, step: StepFeatures) -> None:
        """Learn nothing."""


def main(
    url: str,
    step_seconds: float = _STEP_SECONDS,
    poison: Iterable[int] = (),
    knows_costs: bool = False,
) -> int:
    """Serve until drained; prints the worker's id once it takes jobs.

    Steps fail that have a token of ``poison`` in a prompt.  The scheduler is told what steps take,
    or, with ``knows_costs``, what those of a real model might.
    """
    runner = SlowRunner(step_seconds)
    runner.poison.update(poison)
    runner.run_free()
    with connect(url) as client, Drain() as drain:
        config: dict[str, object] = {"lease_seconds": 1.0, "beat_seconds": 0.2, "policy": FAST}
        rig = Rig(client, url, epoch=0, runner=runner, config=config)
        if knows_costs:
            rig.engine.learner = SettledLearner()
        done = rig.process.run(drain, on_ready=lambda: print(rig.worker_id, flush=True))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:])))
