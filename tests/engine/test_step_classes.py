"""Interactive sequences before standard ones before batch ones, and what batch may hold."""

import pytest

from support.fake_engine import make_seq
from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


def make_scheduler(num_blocks: int = 100, *, budget: int = 32) -> StepScheduler:
    config = StepConfig(max_model_len=400, max_num_seqs=8, max_num_batched_tokens=budget)
    return StepScheduler(config, BlockManager(num_blocks, 4, watermark=0.0))


def add(scheduler: StepScheduler, length: int, priority: int, max_tokens: int = 8) -> Sequence:
    number = 1 + scheduler._num_added
    prompt = [1000 * number + position for position in range(length)]
    seq = make_seq(prompt, max_tokens, priority=priority)
    scheduler.add(seq)
    return seq


def advance(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, [(7,)] * len(plan.sampling))
    scheduler.check_integrity()
    return plan


def counts(plan: StepPlan) -> dict[str, int]:
    return {item.seq.seq_id: item.num_tokens for item in plan.scheduled}


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (-7, PriorityClass.INTERACTIVE),
        (-1, PriorityClass.INTERACTIVE),
        (0, PriorityClass.STANDARD),
        (1, PriorityClass.BATCH),
        (99, PriorityClass.BATCH),
    ],
)
def test_the_sign_of_a_priority_is_its_class(priority: int, expected: PriorityClass) -> None:
    assert make_seq([1], priority=priority).priority_class is expected


def test_an_interactive_prompt_comes_before_a_batch_prefill_in_progress() -> None:
    scheduler = make_scheduler()
    batch = add(scheduler, 200, 1)
    advance(scheduler)
    urgent = add(scheduler, 20, -1)
    assert counts(advance(scheduler)) == {urgent.seq_id: 20, batch.seq_id: 12}
    assert counts(advance(scheduler)) == {urgent.seq_id: 1, batch.seq_id: 31}


def test_the_classes_share_a_step_in_order() -> None:
    scheduler = make_scheduler(budget=20)
    batch, standard = add(scheduler, 60, 3), add(scheduler, 60, 0)
    advance(scheduler)
    assert counts(advance(scheduler)) == {standard.seq_id: 20}
    interactive = add(scheduler, 15, -2)
    assert counts(advance(scheduler)) == {interactive.seq_id: 15, standard.seq_id: 5}
    for _ in range(2):
        plan = advance(scheduler)
    assert counts(plan) == {interactive.seq_id: 1, standard.seq_id: 1, batch.seq_id: 18}


def test_batch_sequences_leave_fifteen_percent_of_the_cache_to_others() -> None:
    scheduler = make_scheduler(100, budget=400)
    add(scheduler, 200, 1)
    fits, too_much = add(scheduler, 140, 1), add(scheduler, 4, 1)
    advance(scheduler)
    # 50 and 35 of the 100 blocks are held, one more would be above the share.
    assert set(scheduler.waiting) == {too_much}
    assert fits.output_ids
    standard = add(scheduler, 40, 0)
    advance(scheduler)
    assert standard.output_ids
    assert set(scheduler.waiting) == {too_much}


def test_alone_in_the_cache_a_batch_sequence_may_fill_it() -> None:
    scheduler = make_scheduler(20, budget=100)
    seq = add(scheduler, 78, 1, max_tokens=2)
    advance(scheduler)
    assert scheduler.block_manager.num_free_blocks == 0
    assert seq.output_ids


def test_what_batch_may_hold_is_a_setting_and_must_be_a_share() -> None:
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="batch_kv_share"):
            StepConfig(max_model_len=8, batch_kv_share=share)
    config = StepConfig(max_model_len=400, max_num_batched_tokens=400, batch_kv_share=1.0)
    scheduler = StepScheduler(config, BlockManager(100, 4, watermark=0.0))
    add(scheduler, 200, 1)
    add(scheduler, 192, 1)
    advance(scheduler)
    assert not scheduler.waiting


def test_blocks_run_out_for_the_newest_batch_sequence_first() -> None:
    scheduler = make_scheduler(12, budget=64)
    oldest, older = add(scheduler, 8, 1), add(scheduler, 8, 1)
    advance(scheduler)
    standard, interactive = add(scheduler, 8, 0), add(scheduler, 8, -1)
    preempted: list[Sequence] = []
    while len(preempted) < 2:
        preempted += advance(scheduler).preempted
    assert preempted == [older, oldest]
    assert list(scheduler.running) == [interactive, standard]
