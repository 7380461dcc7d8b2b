"""The engine around a fake model whose tokens betray every wrong block."""

import pytest

from support.fake_engine import (
    FakeProcessor,
    FakeRunner,
    FakeSampler,
    generate,
    make_seq,
)
from tidemill.protocol.errors import InvalidRequest
from tidemill_gpuworker.engine.engine import Engine, StepOutput
from tidemill_gpuworker.engine.sequence import Sequence, SequenceStatus
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

SHARED = list(range(100, 120))


class Rig:
    """An engine with a fake model, and everything it has told so far."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
    ) -> None:
        self.runner = FakeRunner(num_blocks, block_size)
        config = StepConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.scheduler = StepScheduler(config, BlockManager(num_blocks, block_size))
        self.ticks = iter(range(10_000))
        self.engine = Engine(
            self.runner,
            FakeSampler(),
            self.scheduler,
            self.make_processor,
            clock=lambda: float(next(self.ticks)),
        )
        self.processors: dict[str, FakeProcessor] = {}
        self.told: dict[str, list[StepOutput]] = {}

    def make_processor(self, seq: Sequence) -> FakeProcessor:
        processor = FakeProcessor(seq.params.max_tokens or 1)
        self.processors[seq.seq_id] = processor
        return processor

    def step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        for output in outputs:
            self.told.setdefault(output.seq.seq_id, []).append(output)
        self.scheduler.check_integrity()
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def ids(self, seq: Sequence) -> list[int]:
        return [token for output in self.told[seq.seq_id] for token in output.new_ids]


def test_one_sequence_gets_the_tokens_of_the_model() -> None:
    rig = Rig()
    seq = make_seq([1, 2, 3, 4, 5], 7)
    rig.engine.add(seq)

    rig.run()

    assert rig.ids(seq) == generate([1, 2, 3, 4, 5], 7)
    assert [output.finish for output in rig.told[seq.seq_id][:-1]] == [None] * 6
    finish = rig.told[seq.seq_id][-1].finish
    assert finish is not None
    assert finish.reason == "length"
    assert seq.status is SequenceStatus.FINISHED


def test_a_finished_sequence_gives_its_blocks_back_at_once() -> None:
    rig = Rig()
    rig.engine.add(make_seq([1, 2, 3, 4, 5], 1))

    outputs = rig.step()

    assert outputs[0].finish is not None
    assert rig.scheduler.block_manager.num_free_blocks == 64
    assert not rig.engine.has_work


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_sequences_with_a_common_prefix_do_not_disturb_each_other(block_size: int) -> None:
    rig = Rig(block_size=block_size, max_model_len=60)
    seqs = [make_seq([*SHARED, number, *range(number)], 10) for number in range(12)]
    for seq in seqs:
        rig.engine.add(seq)

    rig.run()

    for seq in seqs:
        assert rig.ids(seq) == generate(seq.prompt_ids, 10)


def test_preempted_sequences_generate_the_same_tokens() -> None:
    rig = Rig(num_blocks=16, max_model_len=64)
    seqs = [make_seq([number] * 9, 30) for number in range(6)]
    for seq in seqs:
        rig.engine.add(seq)

    rig.run()

    assert rig.engine.figures.num_preemptions > 0
    for seq in seqs:
        assert rig.ids(seq) == generate(seq.prompt_ids, 30)


def test_a_step_that_fails_changes_nothing_in_what_is_told() -> None:
    rig = Rig()
    rig.runner.fail_before = {1, 4}
    rig.runner.fail_after = {2, 6}
    seqs = [make_seq([*SHARED, number], 6) for number in range(4)]
    for seq in seqs:
        rig.engine.add(seq)

    failures = 0
    while rig.engine.has_work:
        try:
            rig.step()
        except RuntimeError:
            failures += 1
            rig.scheduler.check_integrity()

    assert failures == 4
    for seq in seqs:
        assert rig.ids(seq) == generate(seq.prompt_ids, 6)


def test_after_a_processor_broke_all_sequences_can_be_built_again() -> None:
    rig = Rig()
    seqs = [make_seq([*SHARED, number], 5, seq_id=str(number)) for number in range(3)]
    for seq in seqs:
        rig.engine.add(seq)
    rig.step()
    rig.processors["1"].num_tokens = "broken"  # type: ignore[assignment]  # to make it raise

    with pytest.raises(TypeError):
        rig.step()
    for seq in seqs:
        assert rig.engine.abort(seq.seq_id) is seq
        again = make_seq(seq.prompt_ids, 5, seq_id=seq.seq_id, output=rig.ids(seq))
        rig.engine.add(again)
    rig.scheduler.check_integrity()
    rig.run()

    for seq in seqs:
        assert rig.ids(seq) == generate(seq.prompt_ids, 5)


def test_a_resumed_sequence_goes_on_where_the_earlier_attempt_stopped() -> None:
    rig = Rig()
    expected = generate(SHARED, 9)
    seq = make_seq(SHARED, 9, output=expected[:4])
    rig.engine.add(seq)

    rig.run()

    assert rig.ids(seq) == expected[4:]


def test_a_resumed_sequence_that_was_complete_ends_without_a_step() -> None:
    rig = Rig()
    seq = make_seq(SHARED, 4, output=generate(SHARED, 4))
    rig.engine.add(seq)
    assert rig.engine.has_work

    [output] = rig.step()

    assert output.finish is not None
    assert output.new_ids == ()
    assert rig.runner.plans == []
    assert not rig.engine.has_work


def test_an_aborted_sequence_is_told_of_no_more() -> None:
    rig = Rig()
    gone, stays = make_seq([*SHARED, 1], 8), make_seq([*SHARED, 2], 8)
    rig.engine.add(gone)
    rig.engine.add(stays)
    rig.step()

    assert rig.engine.abort(gone.seq_id) is gone
    assert rig.engine.abort(gone.seq_id) is None
    rig.scheduler.check_integrity()
    rig.run()

    assert len(rig.ids(gone)) == 1
    assert rig.ids(stays) == generate(stays.prompt_ids, 8)


def test_an_aborted_replay_is_not_told() -> None:
    rig = Rig()
    seq = make_seq(SHARED, 4, output=generate(SHARED, 4))
    rig.engine.add(seq)

    assert rig.engine.abort(seq.seq_id) is seq

    assert not rig.engine.has_work
    assert rig.step() == []


def test_a_refused_sequence_leaves_no_trace() -> None:
    rig = Rig(max_model_len=8)

    with pytest.raises(InvalidRequest, match="8 tokens") as caught:
        rig.engine.add(make_seq(range(8), 1))

    assert caught.value.field == "prompt"
    assert not rig.engine.has_work


def test_the_figures_count_what_was_computed_and_what_was_not() -> None:
    rig = Rig()
    rig.engine.add(make_seq([*SHARED, 1], 3))
    rig.engine.add(make_seq([*SHARED, 2], 3))

    rig.run()

    figures = rig.engine.figures
    assert figures.num_queried_tokens == 42
    assert figures.num_cached_tokens == 20
    assert figures.num_prompt_tokens == 22
    assert figures.num_generated_tokens == 6
    assert figures.num_steps == 3
    assert figures.num_preemptions == 0
    assert figures.last_step_seconds == 1.0
    assert figures.total_step_seconds == 3.0
