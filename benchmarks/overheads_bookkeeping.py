"""An engine without a model: all that is left of a step is its bookkeeping."""

from dataclasses import dataclass

from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.job_engine import Finish
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


def bookkeeping_engine(config: StepConfig, num_blocks: int, block_size: int) -> Engine:
    """Return an engine that schedules, but computes nothing: all get the same token."""
    caching = config.scheduling_mode == "continuous"
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
    scheduler = StepScheduler(config, blocks)
    return Engine(_NoModel(), _NoSampler(), scheduler, _Counter)


class _NoModel:
    def execute(self, plan: StepPlan) -> None:
        """Compute nothing."""


class _NoSampler:
    def sample(self, logits: None, rows: list[Sequence]) -> list[SampledToken]:
        """Return the same token for everybody."""
        return [SampledToken(7, None)] * len(rows)


@dataclass(frozen=True, slots=True)
class _Told:
    text: str
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class _End:
    reason: str = "length"
    stop_reason: str | int | None = None


class _Counter:
    """Ends a sequence at its longest."""

    def __init__(self, seq: Sequence) -> None:
        assert seq.params.max_tokens is not None, "a benchmark says how long its outputs are"
        self._left = seq.params.max_tokens

    def process(self, token_id: int) -> _Told:
        """Take the next token."""
        self._left -= 1
        return _Told("", None if self._left else _End())

    def replay(self, token_ids: list[int]) -> _Told:
        """Take the tokens of an earlier attempt."""
        raise AssertionError("there was none")
