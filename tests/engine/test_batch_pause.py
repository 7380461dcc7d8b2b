"""Decodes of the batch class stand back in steps that prefill for the interactive class."""

from pathlib import Path

import pytest
import torch

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from support.greedy import reference_outputs
from support.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.step_cost import StepCost
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BATCH, STANDARD, INTERACTIVE = 1, 0, -1


def make_scheduler(num_blocks: int = 100, **settings: object) -> StepScheduler:
    values = {"max_model_len": 400, "max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
    config = StepConfig(**values)  # type: ignore[arg-type]
    return StepScheduler(config, BlockManager(num_blocks, 4, watermark=0.0))


def add(scheduler: StepScheduler, length: int, priority: int, max_tokens: int = 100) -> Sequence:
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


def test_a_batch_decode_pauses_until_the_interactive_prompt_is_computed() -> None:
    scheduler = make_scheduler()
    batch = add(scheduler, 10, BATCH)
    advance(scheduler)
    blocks = list(batch.block_table)
    urgent = add(scheduler, 70, INTERACTIVE)
    for chunk in (32, 32, 6):
        assert counts(advance(scheduler)) == {urgent.seq_id: chunk}
        assert batch.block_table == blocks
    assert counts(advance(scheduler)) == {batch.seq_id: 1, urgent.seq_id: 1}
    assert list(scheduler.running) == [batch, urgent]


@pytest.mark.parametrize("priority", [STANDARD, INTERACTIVE])
def test_decodes_of_the_other_classes_never_pause(priority: int) -> None:
    scheduler = make_scheduler()
    watched = add(scheduler, 10, priority)
    advance(scheduler)
    urgent = add(scheduler, 100, INTERACTIVE)
    assert counts(advance(scheduler)) == {watched.seq_id: 1, urgent.seq_id: 31}


@pytest.mark.parametrize("priority", [STANDARD, BATCH])
def test_prefills_of_the_other_classes_pause_nothing(priority: int) -> None:
    scheduler = make_scheduler()
    batch = add(scheduler, 10, BATCH)
    advance(scheduler)
    other = add(scheduler, 100, priority)
    assert counts(advance(scheduler)) == {batch.seq_id: 1, other.seq_id: 31}


def test_what_an_interactive_prompt_leaves_of_a_step_goes_to_other_prefills() -> None:
    scheduler = make_scheduler()
    batch = add(scheduler, 10, BATCH)
    advance(scheduler)
    other, urgent = add(scheduler, 40, BATCH), add(scheduler, 20, INTERACTIVE)
    assert counts(advance(scheduler)) == {urgent.seq_id: 20, other.seq_id: 12}
    assert batch.output_ids == [7]


def test_after_so_many_steps_comes_one_with_all_decodes() -> None:
    scheduler = make_scheduler(200, max_paused_steps=3)
    seqs = [add(scheduler, 4, BATCH) for _ in range(2)]
    advance(scheduler)
    add(scheduler, 390, INTERACTIVE)
    gained = []
    for _ in range(12):
        before = [len(seq.output_ids) for seq in seqs]
        advance(scheduler)
        gained.append([len(seq.output_ids) - num for seq, num in zip(seqs, before, strict=True)])
    assert gained == 3 * [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_unless_told_otherwise_sixty_four_steps_pause_in_a_row_at_most() -> None:
    scheduler = make_scheduler(
        200, max_model_len=800, max_num_batched_tokens=8, long_prefill_token_threshold=8
    )
    batch = add(scheduler, 4, BATCH)
    advance(scheduler)
    add(scheduler, 780, INTERACTIVE)
    pauses = [batch.seq_id not in counts(advance(scheduler)) for _ in range(70)]
    assert pauses == [*[True] * 64, False, *[True] * 5]


def test_without_steps_to_pause_batch_decodes_go_on() -> None:
    scheduler = make_scheduler(max_paused_steps=0)
    batch = add(scheduler, 10, BATCH)
    advance(scheduler)
    urgent = add(scheduler, 200, INTERACTIVE)
    assert counts(advance(scheduler)) == {batch.seq_id: 1, urgent.seq_id: 31}
    with pytest.raises(ConfigError, match="max_paused_steps is negative"):
        make_scheduler(max_paused_steps=-1)


def test_batch_decodes_go_on_while_an_interactive_prompt_waits_for_their_place() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_displacements=0)
    seqs = [add(scheduler, 4, BATCH) for _ in range(2)]
    advance(scheduler)
    add(scheduler, 10, INTERACTIVE)
    for _ in range(3):
        assert counts(advance(scheduler)) == {seq.seq_id: 1 for seq in seqs}


def test_batch_decodes_go_on_while_an_interactive_prompt_waits_for_their_blocks() -> None:
    scheduler = make_scheduler(20)
    batch = add(scheduler, 30, BATCH, max_tokens=8)
    advance(scheduler)
    add(scheduler, 60, INTERACTIVE, max_tokens=8)
    for _ in range(3):
        assert counts(advance(scheduler)) == {batch.seq_id: 1}


def test_decodes_that_go_on_after_all_are_not_left_out_for_want_of_time() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_displacements=0, tpot_slo_seconds=0.5)
    scheduler.step_cost = StepCost(base=2.0, per_token=1.0, per_pair=0.0, per_context=0.0)
    seqs = [add(scheduler, 3, BATCH) for _ in range(7)]
    seqs.append(add(scheduler, 3, STANDARD))
    while not all(seq.output_ids for seq in seqs):
        advance(scheduler)
    add(scheduler, 10, INTERACTIVE)
    assert counts(advance(scheduler)) == {seq.seq_id: 1 for seq in seqs}


def test_decodes_pause_while_their_likes_compute_what_interactive_followers_wait_for() -> None:
    scheduler = make_scheduler()
    decode = add(scheduler, 4, BATCH)
    advance(scheduler)
    leader = add(scheduler, 100, BATCH)
    assert counts(advance(scheduler)) == {decode.seq_id: 1, leader.seq_id: 31}
    follower = make_seq(leader.prompt_ids[:98], 8, priority=INTERACTIVE)
    scheduler.add(follower)
    assert counts(advance(scheduler)) == {leader.seq_id: 32}


def run_fake(most_paused: int) -> tuple[list[list[int]], int]:
    """Generate for jobs of all classes; returns outputs and the steps without batch decodes."""
    scheduler = make_scheduler(60, max_paused_steps=most_paused, max_num_batched_tokens=16)
    runner = FakeRunner(60, 4)
    engine = Engine(
        runner, FakeSampler(), scheduler, lambda seq: FakeProcessor(seq.params.max_tokens or 1)
    )
    seqs = [make_seq([n] * 9, 12, priority=(BATCH, STANDARD)[n % 2]) for n in range(4)]
    for seq in seqs:
        engine.add(seq)
    num_pauses = number = 0
    while engine.has_work:
        number += 1
        if number in (5, 12):
            seqs.append(make_seq([number, *range(40)], 5, priority=INTERACTIVE))
            engine.add(seqs[-1])
        due = {s.seq_id for s in scheduler.running if s.priority > 0 and s.output_ids}
        engine.step()
        num_pauses += bool(due - set(counts(runner.plans[-1])))
    for seq in seqs:
        assert seq.output_ids == generate(seq.prompt_ids, seq.params.max_tokens or 1)
    return [seq.output_ids for seq in seqs], num_pauses


def test_sequences_that_paused_generate_what_they_would_have_without() -> None:
    paused, num_pauses = run_fake(64)
    straight, num_straight_pauses = run_fake(0)
    assert paused == straight
    assert num_pauses > 0
    assert num_straight_pauses == 0


def test_a_pause_changes_no_token_of_a_model(tmp_path: Path) -> None:
    runner = ModelRunner(
        save_tiny_model("llama-tied", tmp_path), dtype="float32", num_blocks=64, num_threads=1
    )
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (7, 30, 19, 130)
    ]
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=8)
    scheduler = StepScheduler(config, BlockManager(runner.num_blocks, runner.block_size))
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    priorities = (BATCH, BATCH, STANDARD, INTERACTIVE)
    seqs = [
        Sequence(str(number), prompt, params, seed=0, priority=priority)
        for number, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True))
    ]
    for seq in seqs[:3]:
        scheduler.add(seq)
    num_pauses = num_steps = 0
    while scheduler.has_work:
        num_steps += 1
        if num_steps == 5:
            scheduler.add(seqs[3])
        plan = scheduler.schedule()
        num_pauses += num_steps >= 5 and not {"0", "1"} & set(counts(plan))
        scheduler.update(plan, [(token,) for token in runner.execute(plan).argmax(-1).tolist()])
        for seq in [seq for seq in scheduler.running if len(seq.output_ids) == 10]:
            scheduler.finish(seq)
    assert num_pauses >= 4
    model = make_tiny_model("llama-tied")
    assert [seq.output_ids for seq in seqs] == reference_outputs(model, prompts, 10)
