"""Which sequences and which limits a step scheduler refuses."""

from typing import Any

import pytest

from support.fake_engine import make_seq
from tidemill.protocol.errors import ConfigError, InvalidRequest
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


def make_scheduler(num_blocks: int = 64, *, max_model_len: int = 128) -> StepScheduler:
    config = StepConfig(max_model_len=max_model_len, max_num_seqs=8, max_num_batched_tokens=32)
    return StepScheduler(config, BlockManager(num_blocks, 4, watermark=0.0))


def add(scheduler: StepScheduler, length: int, max_tokens: int | None = 8) -> None:
    scheduler.add(make_seq(list(range(length)), max_tokens))


def test_a_prompt_without_room_for_output_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=16)
    add(scheduler, 15)

    with pytest.raises(InvalidRequest, match="16 tokens") as caught:
        add(scheduler, 16)

    assert caught.value.field == "prompt"
    assert "15 tokens or fewer" in caught.value.fix
    assert len(scheduler.waiting) == 1


def test_a_sequence_that_could_outgrow_the_cache_is_refused() -> None:
    scheduler = make_scheduler(4, max_model_len=100)
    add(scheduler, 10, max_tokens=7)

    with pytest.raises(InvalidRequest, match="can reach 18 tokens") as caught:
        add(scheduler, 10, max_tokens=8)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequest, match="can reach 100 tokens"):
        add(scheduler, 10, max_tokens=None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"long_prefill_token_threshold": -1}, "threshold is negative"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "below max_num_seqs 65"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "without chunked prefill"),
    ],
)
def test_limits_that_cannot_work_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        StepConfig(**{"max_model_len": 128, **change})
