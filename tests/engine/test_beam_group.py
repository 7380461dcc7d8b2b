"""Beams in one engine with a fake model, among others and in caches that are too small."""

import random

import pytest

from support.fake_engine import (
    FakeProcessor,
    FakeRunner,
    FakeSampler,
    generate,
    make_seq,
    search_beams,
)
from support.worker_rig import make_tokenizer
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.beam_choice import BeamChoice
from tidemill_gpuworker.engine.beam_group import BeamGroup, beam_params
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.output_processor import OutputProcessor
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import SchedulingMode, StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 4
NUM_TOKENS = 9
PROMPT = list(range(1, 11))


class Stage:
    """An engine for groups, and what it has told of each job and choice."""

    def __init__(
        self, num_blocks: int = 64, max_num_seqs: int = 16, mode: SchedulingMode = "continuous"
    ) -> None:
        config = StepConfig(
            max_model_len=24,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            scheduling_mode=mode,
        )
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, watermark=0.0)
        self.scheduler = StepScheduler(config, self.blocks)
        self.inner = Engine(
            self.runner, FakeSampler(), self.scheduler, lambda seq: FakeProcessor(NUM_TOKENS)
        )
        self.engine = GroupEngine(self.inner)
        self.told: dict[tuple[str, int], list[int]] = {}

    def step(self) -> None:
        for output in self.engine.step():
            if output.new_ids:
                key = (output.seq.seq_id, getattr(output, "choice", 0))
                self.told.setdefault(key, []).extend(output.new_ids)
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.inner.has_work:
            self.step()
        assert self.blocks.num_free_blocks == self.blocks.num_blocks


def make_group(width: int, prompt: list[int] = PROMPT, *, job_id: str = "job") -> BeamGroup:
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=NUM_TOKENS, ignore_eos=True)
    root = make_seq(prompt, seq_id=f"{job_id}#0")
    root.params, root.is_beam = beam_params(params), True
    choice = BeamChoice(width, prompt_len=len(prompt), max_tokens=NUM_TOKENS)
    return BeamGroup(root, params, choice)


def expected(width: int, prompt: list[int] = PROMPT) -> list[list[int]]:
    return search_beams(prompt, width, NUM_TOKENS)


def told_of(stage: Stage, job_id: str = "job") -> list[list[int]]:
    return [ids for (job, _), ids in sorted(stage.told.items()) if job == job_id]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_beams_are_those_of_a_search_without_an_engine(width: int) -> None:
    stage = Stage()
    stage.engine.add(make_group(width))
    stage.run()
    assert told_of(stage) == expected(width)


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(6, 16), (64, 2), (64, 1)])
def test_searches_that_wait_for_each_other_all_end(num_blocks: int, max_num_seqs: int) -> None:
    stage = Stage(num_blocks, max_num_seqs)
    prompts = {"a": PROMPT, "b": [9, 8, 7], "c": PROMPT[:7]}
    for job_id, prompt in prompts.items():
        stage.engine.add(make_group(3, prompt, job_id=job_id))
    stage.run()
    for job_id, prompt in prompts.items():
        assert told_of(stage, job_id) == expected(3, prompt)


def test_a_step_that_fails_changes_no_beam() -> None:
    stage = Stage()
    stage.runner.fail_after = {1, 3, 6}
    stage.engine.add(make_group(3))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="fails"):
            while True:
                stage.step()
    stage.run()
    assert told_of(stage) == expected(3)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_search_leaves_nothing_behind(num_steps: int) -> None:
    stage = Stage(num_blocks=6)
    stage.engine.add(make_group(4))
    for _ in range(num_steps):
        stage.step()
    assert stage.engine.abort("job") is not None
    stage.run()
    assert not stage.told


def test_static_batches_take_no_beams() -> None:
    stage = Stage(mode="static")
    with pytest.raises(InvalidRequest, match="static batches"):
        stage.engine.add(make_group(2))
    stage.run()


@pytest.mark.parametrize("seed", range(4))
def test_searches_and_single_jobs_share_a_cache_that_is_too_small(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(num_blocks=10, max_num_seqs=4)
    stage.runner.fail_after = set(rng.sample(range(1, 120), 12))
    jobs: dict[str, tuple[list[int], int]] = {}
    for number in range(120):
        if rng.random() < 0.15:
            job_id, prompt = f"job-{number}", [*PROMPT[: rng.randint(1, 10)], number % 3]
            jobs[job_id] = prompt, rng.randint(0, 3)
            single = make_seq(prompt, NUM_TOKENS, seq_id=job_id, priority=rng.randint(-1, 1))
            width = jobs[job_id][1]
            stage.engine.add(make_group(width, prompt, job_id=job_id) if width else single)
        try:
            stage.step()
        except RuntimeError as error:
            assert "fails" in str(error)
    stage.runner.fail_after.clear()
    stage.run()
    for job_id, (prompt, width) in jobs.items():
        whole = expected(width, prompt) if width else [generate(prompt, NUM_TOKENS)]
        assert told_of(stage, job_id) == whole


@pytest.mark.parametrize(
    ("ids", "text", "reason"),
    [([1, 2, 0], "tide mill", "stop"), ([3, 4, 3, 4], "water wheel water wheel", "length")],
)
def test_the_text_of_a_beam_is_made_at_the_end(ids: list[int], text: str, reason: str) -> None:
    params = beam_params(SamplingParams(n=2, use_beam_search=True, max_tokens=4))
    processor = OutputProcessor(
        make_tokenizer(), params, prompt_len=3, max_model_len=50, num_published_chars=0
    )
    output = processor.replay(ids)
    assert output.finish is not None
    assert (output.text.strip(), output.finish.reason) == (text, reason)
