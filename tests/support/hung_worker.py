"""A worker process whose fake model never comes back from some prompts: ``... URL``."""

import sys
import threading

from support.worker_rig import PacedRunner, Rig
from tidemill.service.redis import connect
from tidemill.service.runtime import Drain
from tidemill_gpuworker.step_plan import StepPlan

#: The token that hangs a step.
HANGS = 666


class HangingRunner(PacedRunner):
    """Waits for ever if it sees ``HANGS``."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute, or hang."""
        if any(HANGS in item.seq.prompt_ids for item in plan.scheduled):
            threading.Event().wait()
        return super().execute(plan)


def main(url: str) -> None:
    """Serve until drained or hung; prints the worker's id once it takes jobs."""
    runner = HangingRunner()
    runner.run_free()
    config: dict[str, object] = {
        "lease_seconds": 1.5,
        "beat_seconds": 0.05,
        "max_step_seconds": 0.2,
    }
    with connect(url) as client, Drain() as drain:
        rig = Rig(client, url, epoch=0, runner=runner, config=config)
        rig.process.run(drain, on_ready=lambda: print(rig.worker_id, flush=True))


if __name__ == "__main__":
    main(sys.argv[1])
