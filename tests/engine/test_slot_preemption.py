"""Interactive sequences when all places are taken."""

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence, SequenceStatus
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BATCH, STANDARD, INTERACTIVE = 1, 0, -1


def make_scheduler(num_blocks: int = 100, **settings: object) -> StepScheduler:
    values = {"max_model_len": 200, "max_num_seqs": 2, "max_num_batched_tokens": 32, **settings}
    config = StepConfig(**values)  # type: ignore[arg-type]
    return StepScheduler(config, BlockManager(num_blocks, 4, watermark=0.0))


def add(scheduler: StepScheduler, length: int, priority: int) -> Sequence:
    number = 1 + scheduler._num_added
    seq = make_seq([1000 * number + k for k in range(length)], 16, priority=priority)
    scheduler.add(seq)
    return seq


def advance(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, [(7,)] * len(plan.sampling))
    scheduler.check_integrity()
    return plan


def test_an_interactive_sequence_takes_the_place_of_the_least_urgent_batch_one() -> None:
    scheduler = make_scheduler()
    first, second = add(scheduler, 6, BATCH), add(scheduler, 6, BATCH)
    advance(scheduler)
    urgent = add(scheduler, 6, INTERACTIVE)

    plan = advance(scheduler)

    assert plan.preempted == (second,)
    assert second.status is SequenceStatus.WAITING
    assert set(scheduler.running) == {first, urgent}
    assert scheduler.num_preemptions == 1


def test_no_place_is_taken_while_one_is_free() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for _ in range(2):
        add(scheduler, 6, BATCH)
    advance(scheduler)
    add(scheduler, 6, INTERACTIVE)
    assert advance(scheduler).preempted == ()
    assert len(scheduler.running) == 3


@pytest.mark.parametrize(
    ("running", "waiting"),
    [(STANDARD, INTERACTIVE), (INTERACTIVE, INTERACTIVE), (BATCH, STANDARD), (BATCH, BATCH)],
)
def test_only_interactive_ones_take_places_and_only_those_of_batch_ones(
    running: int, waiting: int
) -> None:
    scheduler = make_scheduler()
    held = [add(scheduler, 6, running) for _ in range(2)]
    advance(scheduler)
    add(scheduler, 6, waiting)
    assert advance(scheduler).preempted == ()
    assert set(scheduler.running) == set(held)


def test_no_more_places_are_taken_than_the_step_has_tokens_for() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    for _ in range(4):
        add(scheduler, 6, BATCH)
    advance(scheduler)
    for _ in range(3):
        add(scheduler, 30, INTERACTIVE)
    assert len(advance(scheduler).preempted) == 2


def test_no_place_is_taken_for_a_sequence_whose_blocks_are_not_free() -> None:
    scheduler = make_scheduler(num_blocks=20)
    held = [add(scheduler, 30, BATCH) for _ in range(2)]
    advance(scheduler)
    advance(scheduler)
    add(scheduler, 60, INTERACTIVE)
    assert advance(scheduler).preempted == ()
    assert set(scheduler.running) == set(held)


def test_the_blocks_of_the_one_that_yields_count_as_free() -> None:
    scheduler = make_scheduler(num_blocks=20)
    for _ in range(2):
        add(scheduler, 30, BATCH)
    for _ in range(3):
        advance(scheduler)
    urgent = add(scheduler, 36, INTERACTIVE)
    assert len(advance(scheduler).preempted) == 1
    assert urgent.status is SequenceStatus.RUNNING


def test_who_lost_its_place_too_often_keeps_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_displacements=2)
    batch = add(scheduler, 6, BATCH)
    advance(scheduler)
    for expected in (1, 2, 2, 2):
        urgent = add(scheduler, 6, INTERACTIVE)
        advance(scheduler)
        assert batch.num_preemptions == expected
        scheduler.abort(urgent.seq_id)
        advance(scheduler)
        assert batch.status is SequenceStatus.RUNNING


def test_the_number_of_times_is_checked() -> None:
    with pytest.raises(ConfigError, match="max_displacements is negative"):
        make_scheduler(max_displacements=-1)


def test_nobody_loses_a_token_by_losing_its_place() -> None:
    scheduler = make_scheduler()
    engine = Engine(FakeRunner(100, 4), FakeSampler(), scheduler, lambda seq: FakeProcessor(12))
    seqs = [make_seq([50 * n + k for k in range(7)], 12, priority=BATCH) for n in range(4)]
    for seq in seqs:
        engine.add(seq)
    for number in range(4):
        engine.step()
        seqs.append(make_seq([900 + number], 12, priority=INTERACTIVE))
        engine.add(seqs[-1])
    while engine.has_work:
        engine.step()
    assert scheduler.num_preemptions >= 2
    assert [seq.output_ids for seq in seqs] == [generate(seq.prompt_ids, 12) for seq in seqs]
