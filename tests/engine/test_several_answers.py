"""Jobs of several outputs in one engine: what they share, and when they part."""

import random
from dataclasses import replace

import pytest

from support.fake_engine import (
    FakeProcessor,
    FakeRunner,
    FakeSampler,
    fake_logprob,
    generate,
    make_seq,
)
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.choice_group import ChoiceGroup, params_of
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.group_output import GroupOutput
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import SchedulingMode, StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 4
NUM_TOKENS = 8
PROMPT = list(range(1, 11))


class Stage:
    """An engine for groups, its cache, and what it has told of each choice."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 16,
        max_tokens_per_step: int = 64,
        enable_prefix_caching: bool = True,
        mode: SchedulingMode = "continuous",
    ) -> None:
        config = StepConfig(
            max_model_len=128,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens_per_step,
            scheduling_mode=mode,
        )
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        self.blocks = BlockManager(
            num_blocks, BLOCK_SIZE, watermark=0.0, enable_prefix_caching=enable_prefix_caching
        )
        self.scheduler = StepScheduler(config, self.blocks)
        inner = Engine(
            self.runner,
            FakeSampler(),
            self.scheduler,
            lambda seq: FakeProcessor(seq.params.max_tokens or 1),
        )
        self.inner = inner
        self.engine = GroupEngine(inner)
        self.told: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[str, GroupOutput] = {}

    def step(self) -> None:
        for output in self.engine.step():
            assert isinstance(output, GroupOutput)
            key = (output.seq.seq_id, output.choice)
            self.told.setdefault(key, []).extend(output.new_ids)
            if output.finish is not None:
                self.ends[output.seq.seq_id] = output
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.inner.has_work:
            self.step()


def make_group(
    num: int,
    prompt: list[int] = PROMPT,
    *,
    job_id: str = "job",
    outputs: dict[int, list[int]] | None = None,
    told: list[Generated] | None = None,
    **params: object,
) -> ChoiceGroup:
    fields = {"n": num, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params
    wanted = SamplingParams.model_validate(fields)
    sequences = [
        replace(
            make_seq(prompt, seq_id=f"{job_id}#{choice}", output=(outputs or {}).get(choice, [])),
            choice=choice,
            params=params_of(wanted, choice),
        )
        for choice in range(wanted.num_outputs)
    ]
    return ChoiceGroup(sequences, wanted, told or ())


def expected(choice: int, prompt: list[int] = PROMPT) -> list[int]:
    return generate(prompt, NUM_TOKENS, choice=choice)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_each_choice_says_what_it_says_alone(enable_prefix_caching: bool) -> None:
    stage = Stage(enable_prefix_caching=enable_prefix_caching)
    stage.engine.add(make_group(4))
    stage.run()
    assert stage.told == {("job", choice): expected(choice) for choice in range(4)}
    assert stage.blocks.num_free_blocks == stage.blocks.num_blocks


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    stage = Stage()
    group = make_group(4)
    stage.engine.add(group)
    assert stage.engine.num_followers == 3
    stage.step()
    assert stage.inner.figures.num_prompt_tokens == len(PROMPT)
    assert stage.engine.num_followers == 0
    assert stage.blocks.num_blocks - stage.blocks.num_free_blocks == 3
    tables = {tuple(seq.block_table) for seq in group.sequences}
    assert len(tables) == 1
    stage.step()
    # Each of them writes to the last block of the prompt: all but one to a copy.
    assert stage.blocks.num_forked == 3
    assert stage.blocks.num_blocks - stage.blocks.num_free_blocks == 2 + 4
    stage.run()
    assert stage.inner.figures.num_prompt_tokens == len(PROMPT)


def test_followers_wait_for_a_place_and_say_the_same() -> None:
    stage = Stage(max_num_seqs=2)
    stage.engine.add(make_group(5))
    stage.run()
    assert stage.told == {("job", choice): expected(choice) for choice in range(5)}


def test_a_group_that_is_preempted_says_the_same() -> None:
    stage = Stage(num_blocks=9)
    stage.engine.add(make_group(4))
    stage.run()
    assert stage.scheduler.num_preemptions
    assert stage.told == {("job", choice): expected(choice) for choice in range(4)}
    assert stage.blocks.num_free_blocks == stage.blocks.num_blocks


def test_a_prompt_in_chunks_has_its_followers_start_after_the_last_one() -> None:
    stage = Stage(max_tokens_per_step=4, max_num_seqs=4)
    stage.engine.add(make_group(3))
    stage.step()
    assert (stage.told, stage.engine.num_followers) == ({}, 2)
    stage.run()
    assert stage.told == {("job", choice): expected(choice) for choice in range(3)}


def test_groups_and_single_jobs_run_in_the_same_steps() -> None:
    stage = Stage()
    prompts = {"a": PROMPT, "b": [7, 8, 9], "c": [*PROMPT, 3]}
    for job_id, prompt in prompts.items():
        stage.engine.add(make_group(3, prompt, job_id=job_id))
    stage.run()
    for job_id, prompt in prompts.items():
        for choice in range(3):
            assert stage.told[job_id, choice] == expected(choice, prompt)


def test_a_step_that_fails_draws_again() -> None:
    stage = Stage()
    stage.runner.fail_after = {1, 3}
    stage.engine.add(make_group(3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fails"):
            while True:
                stage.step()
    stage.run()
    assert stage.told == {("job", choice): expected(choice) for choice in range(3)}


def test_choices_go_on_where_an_earlier_attempt_left_each_of_them() -> None:
    stage = Stage()
    outputs = {0: expected(0)[:3], 1: expected(1), 3: expected(3)[:7]}
    stage.engine.add(make_group(4, outputs=outputs))
    stage.run()
    for choice in range(4):
        assert outputs.get(choice, []) + stage.told.get(("job", choice), []) == expected(choice)
    assert [end.finish_reason for end in stage.ends["job"].ends] == ["length"] * 4


def test_a_group_that_had_ended_ends_without_a_step() -> None:
    stage = Stage()
    stage.engine.add(make_group(2, outputs={0: expected(0), 1: expected(1)}))
    stage.run()
    assert not stage.runner.plans
    assert len(stage.ends["job"].ends) == 2


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_group_leaves_nothing_behind(num_steps: int) -> None:
    stage = Stage()
    group = make_group(4)
    stage.engine.add(group)
    for _ in range(num_steps):
        stage.step()
    assert stage.engine.abort("job") is group
    assert not stage.inner.has_work
    assert stage.engine.num_followers == 0
    assert stage.blocks.num_free_blocks == stage.blocks.num_blocks
    stage.engine.add(make_group(4))
    stage.told.clear()
    stage.run()
    assert stage.told == {("job", choice): expected(choice) for choice in range(4)}


def test_outputs_that_end_with_their_first_token_end_at_once() -> None:
    stage = Stage()
    stage.engine.add(make_group(3, max_tokens=1))
    stage.step()
    assert not stage.inner.has_work
    assert stage.told == {("job", choice): expected(choice)[:1] for choice in range(3)}


def score(choice: int) -> float:
    told = [fake_logprob(token) for token in expected(choice)]
    return sum(told) / len(told)


def test_the_best_are_told_at_the_end_and_in_order() -> None:
    stage = Stage()
    stage.engine.add(make_group(2, best_of=5))
    stage.step()
    assert stage.told == {("job", 0): []}
    stage.run()
    best = sorted(range(5), key=score, reverse=True)[:2]
    assert stage.told == {("job", number): expected(choice) for number, choice in enumerate(best)}
    scores = [end.score for end in stage.ends["job"].ends]
    assert scores == pytest.approx([score(choice) for choice in best])
    assert len(stage.ends["job"].seq.output_ids) == 5 * NUM_TOKENS


def test_what_was_told_of_the_best_is_not_told_again() -> None:
    best = sorted(range(4), key=score, reverse=True)[:2]
    told = [Generated(expected(best[0]), 0), Generated(expected(best[1])[:2], 0)]
    stage = Stage()
    stage.engine.add(make_group(2, best_of=4, told=told))
    stage.run()
    assert stage.told == {("job", 0): [], ("job", 1): expected(best[1])[2:]}


def test_another_answer_than_the_one_begun_is_not_told() -> None:
    stage = Stage()
    stage.engine.add(make_group(1, best_of=2, told=[Generated([1, 2], 0)]))
    with pytest.raises(ArithmeticError, match="told other tokens of choice 0"):
        stage.run()


def test_groups_run_in_static_batches_too() -> None:
    stage = Stage(mode="static", max_num_seqs=2, num_blocks=80)
    stage.engine.add(make_group(3))
    stage.engine.add(make_group(2, [9, 8, 7], job_id="next"))
    stage.run()
    assert stage.told == {
        **{("job", choice): expected(choice) for choice in range(3)},
        **{("next", choice): expected(choice, [9, 8, 7]) for choice in range(2)},
    }


@pytest.mark.parametrize("seed", range(4))
def test_groups_come_and_go_in_a_cache_that_is_too_small(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(num_blocks=12, max_num_seqs=6, enable_prefix_caching=seed % 2 == 0)
    stage.runner.fail_after = set(rng.sample(range(1, 150), 15))
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for number in range(200):
        if rng.random() < 0.2:
            job_id, length = f"job-{number}", rng.randint(1, 16)
            prompts[job_id] = [*(PROMPT * 2)[:length], number % 3], rng.randint(2, 4)
            stage.engine.add(make_group(prompts[job_id][1], prompts[job_id][0], job_id=job_id))
        if prompts and rng.random() < 0.05:
            job_id = rng.choice(list(prompts))
            if stage.engine.abort(job_id) is not None:
                aborted.add(job_id)
        try:
            stage.step()
        except RuntimeError as error:
            assert "fails" in str(error)
    stage.runner.fail_after.clear()
    stage.run()
    assert stage.blocks.num_free_blocks == stage.blocks.num_blocks
    for job_id, (prompt, num) in prompts.items():
        for choice in range(num):
            told, whole = stage.told.get((job_id, choice), []), expected(choice, prompt)
            assert told == (whole[: len(told)] if job_id in aborted else whole)
    assert aborted
