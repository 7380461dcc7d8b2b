"""The baseline: batches that nobody joins, and room for the longest sequence for each."""

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


def make_scheduler(num_blocks: int = 40, max_num_seqs: int = 3) -> StepScheduler:
    config = StepConfig(
        max_model_len=40,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        scheduling_mode="static",
    )
    blocks = BlockManager(num_blocks, 4, watermark=0.0, enable_prefix_caching=False)
    return StepScheduler(config, blocks)


def make_engine(scheduler: StepScheduler, lengths: dict[str, int]) -> Engine:
    runner = FakeRunner(scheduler.block_manager.num_blocks, 4)
    return Engine(runner, FakeSampler(), scheduler, lambda seq: FakeProcessor(lengths[seq.seq_id]))


def test_a_batch_runs_until_its_last_sequence_ends_and_nobody_joins_it() -> None:
    scheduler = make_scheduler()
    lengths = {"a": 2, "b": 9, "c": 4, "d": 3, "e": 1}
    engine = make_engine(scheduler, lengths)
    seqs = [make_seq([ord(name)], 20, seq_id=name) for name in lengths]
    for seq in seqs:
        engine.add(seq)
    seen = []
    while engine.has_work:
        engine.step()
        seen.append("".join(sorted(seq.seq_id for seq in scheduler.running)))

    # What runs after each of the 9 steps of the first batch and the 3 of the second.
    assert seen == ["abc", "bc", "bc", *["b"] * 5, "", "de"[:1], "d", ""]
    for seq in seqs:
        assert seq.output_ids == generate(seq.prompt_ids, lengths[seq.seq_id])


def test_every_sequence_has_the_room_of_the_longest() -> None:
    scheduler = make_scheduler()
    engine = make_engine(scheduler, {"a": 5, "b": 5})
    for name in "ab":
        engine.add(make_seq([1], 20, seq_id=name))
    engine.step()
    assert [len(seq.block_table) for seq in scheduler.running] == [10, 10]
    scheduler.check_integrity()


def test_no_more_sequences_form_a_batch_than_have_that_room() -> None:
    scheduler = make_scheduler(num_blocks=29)
    lengths = dict.fromkeys("abc", 3)
    engine = make_engine(scheduler, lengths)
    for name in lengths:
        engine.add(make_seq([1], 20, seq_id=name))
    engine.step()
    assert len(scheduler.running) == 2


def test_a_cache_without_that_room_for_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="reserves 10 KV blocks"):
        make_scheduler(num_blocks=9)
