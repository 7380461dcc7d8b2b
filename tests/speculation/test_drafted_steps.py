"""Drafts in steps: what room and blocks they get, and what becomes of them."""

from collections.abc import Sequence as Several

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 4
#: The fake model knows one token only, so every guess comes true.
TOKEN = 0


class Rig:
    """An engine on a fake model that says the same token for ever, or one of two."""

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        budget: int = 64,
        num_drafted: int = 5,
        vocab_size: int = 1,
        watermark: float = 0.0,
        disable_by_batch_size: int | None = None,
        ends_after: int | None = None,
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, watermark=watermark)
        config = StepConfig(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=budget)
        speculation = SpeculativeConfig(
            num_speculative_tokens=num_drafted,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
            disable_by_batch_size=disable_by_batch_size,
        )
        self.scheduler = StepScheduler(config, self.blocks, Drafter(speculation, 100))
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE, vocab_size=vocab_size)
        self.engine = Engine(self.runner, FakeSampler(), self.scheduler, self.make_processor)
        self.ends_after = ends_after
        self.told: dict[str, list[int]] = {}

    def make_processor(self, seq: Sequence) -> FakeProcessor:
        assert seq.params.max_tokens is not None
        return FakeProcessor(self.ends_after or seq.params.max_tokens)

    def add(self, prompt: Several[int], max_tokens: int, priority: int = 0) -> Sequence:
        seq = make_seq(prompt, max_tokens, priority=priority)
        self.engine.add(seq)
        return seq

    def step(self) -> StepPlan:
        for output in self.engine.step():
            self.told.setdefault(output.seq.seq_id, []).extend(output.new_ids)
        self.scheduler.check_integrity()
        return self.runner.plans[-1]

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def drafts(plan: StepPlan) -> list[int]:
    return [len(item.draft) for item in plan.scheduled]


def test_guesses_that_come_true_save_steps() -> None:
    rig = Rig(num_drafted=5)
    seq = rig.add([TOKEN] * 6, 19)

    rig.run()

    # One from the prompt, then six at a time.
    assert [len(plan.scheduled) for plan in rig.runner.plans] == [1] * 4
    assert rig.told[seq.seq_id] == [TOKEN] * 19
    figures = rig.engine.figures.speculation
    assert (figures.num_drafts, figures.num_draft_tokens, figures.num_accepted_tokens) == (
        3,
        15,
        15,
    )
    assert figures.accepted_per_position == [3] * 5


def test_no_guess_reaches_behind_the_last_token_that_is_wanted() -> None:
    rig = Rig(num_drafted=5)
    rig.add([TOKEN] * 6, 4)

    rig.run()

    assert [drafts(plan) for plan in rig.runner.plans] == [[0], [2]]


def test_the_context_of_the_model_bounds_the_guess() -> None:
    rig = Rig(num_drafted=5, budget=128)
    rig.add([TOKEN] * 96, 30)

    rig.step()

    assert drafts(rig.step()) == [2]


def test_what_was_guessed_behind_the_end_is_never_told() -> None:
    # As a stop string does, the fourth token ends it, while a draft reaches to the sixth.
    rig = Rig(num_drafted=5, ends_after=4)
    seq = rig.add([TOKEN] * 6, 30)

    rig.run()

    assert drafts(rig.runner.plans[-1]) == [5]
    assert rig.told[seq.seq_id] == seq.output_ids == [TOKEN] * 4
    assert rig.engine.figures.num_generated_tokens == 4
    assert rig.blocks.num_free_blocks == rig.blocks.num_blocks


@pytest.mark.parametrize("moment", ["fail_before", "fail_after"])
def test_a_failed_step_gives_back_the_blocks_of_its_guesses(moment: str) -> None:
    rig = Rig(num_drafted=5)
    seq = rig.add([TOKEN] * 6, 19)
    rig.step()
    held = list(seq.block_table)
    setattr(rig.runner, moment, {2})

    with pytest.raises(RuntimeError, match="step 2 fails"):
        rig.engine.step()

    rig.scheduler.check_integrity()
    assert seq.block_table == held
    assert rig.scheduler.kv_use.most_empty_slots < BLOCK_SIZE
    rig.run()
    assert rig.told[seq.seq_id] == [TOKEN] * 19
    assert rig.blocks.num_free_blocks == rig.blocks.num_blocks


def test_guesses_that_are_wrong_in_the_middle_change_nothing() -> None:
    rig = Rig(num_drafted=7, vocab_size=2)
    seq = rig.add([0, 1, 0, 1], 60)

    rig.run()

    assert rig.told[seq.seq_id] == generate([0, 1, 0, 1], 60, vocab_size=2)
    figures = rig.engine.figures.speculation
    assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens


def test_prefills_have_the_first_claim_to_the_room_of_a_step() -> None:
    rig = Rig(budget=8, num_drafted=5)
    rig.add([TOKEN] * 6, 30)
    rig.step()
    rig.add([7] * 5, 3)

    plan = rig.step()

    # 1 decode and 5 of the prompt leave 2 of 8.
    assert sorted(drafts(plan)) == [0, 2]
    assert plan.num_tokens == 8


def test_a_guess_takes_no_block_below_the_watermark() -> None:
    rig = Rig(num_blocks=10, watermark=0.8, num_drafted=5)
    rig.add([TOKEN] * 6, 30)
    rig.step()

    # The decode at position 6 has its block, which ends with position 7.
    assert drafts(rig.step()) == [1]


def test_a_large_batch_guesses_nothing() -> None:
    rig = Rig(disable_by_batch_size=1)
    rig.add([TOKEN] * 6, 12)
    rig.step()
    assert drafts(rig.step()) == [5]

    rig.add([TOKEN] * 6, 12)
    rig.step()

    assert drafts(rig.step()) == [0, 0]


def test_blocks_that_accepted_tokens_filled_are_found_by_others() -> None:
    rig = Rig(num_drafted=5)
    first = rig.add([TOKEN] * 6, 20)
    rig.run()

    second = rig.add([TOKEN] * 24, 2)
    rig.run()

    assert len(first.output_ids) == 20
    assert second.num_cached_tokens == 20


def test_wrong_guesses_leave_nothing_in_the_cache_and_hold_no_block() -> None:
    rig = Rig(num_drafted=7, vocab_size=50_000)
    seq = rig.add([1, 2, 3, 4, 1, 2, 3], 30)
    rig.step()
    # As if the model had said what came before.
    seq.output_ids[-1] = 4

    plan = rig.step()

    assert plan.scheduled[0].draft == (1, 2, 3, 4, 1, 2, 3)
    assert rig.engine.figures.speculation.num_accepted_tokens == 0
    # The two blocks that are known, and nothing of the seven tokens behind them.
    assert rig.blocks.count_prefix(make_seq([1, 2, 3, 4] * 4)) == 2
    assert len(seq.block_table) == 2
