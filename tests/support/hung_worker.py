"""A worker process that never comes back from some prompts: ``... URL``."""

import sys
import threading

from support.fake_engine import FakeProcessor
from support.worker_rig import PacedRunner, Rig, make_tokenizer_files
from tidemill.service.redis import connect
from tidemill.service.runtime import Drain
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.steps.step_plan import StepPlan

#: The token that hangs a step, and the one that hangs the engine when the prompt is added.
HANGS = 666
HANGS_ADDED = 667

#: The text that hangs the tokenizer.
HANGING_TEXT = "grain"


class HangingProcessor(FakeProcessor):
    """Is never made."""

    def __init__(self, num_tokens: int) -> None:
        """Hang."""
        threading.Event().wait()


class HangingTokenizer(Tokenizer):
    """Waits for ever if it sees ``HANGING_TEXT``."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise, or hang."""
        if text == HANGING_TEXT:
            threading.Event().wait()
        return super().encode(text, add_special_tokens=add_special_tokens)


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
        rig = Rig(
            client,
            url,
            epoch=0,
            runner=runner,
            config=config,
            processors={HANGS_ADDED: HangingProcessor},
            tokenizer=HangingTokenizer(make_tokenizer_files()),
        )
        rig.process.run(drain, on_ready=lambda: print(rig.worker_id, flush=True))


if __name__ == "__main__":
    main(sys.argv[1])
