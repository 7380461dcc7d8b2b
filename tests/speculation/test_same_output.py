"""Outputs with and without speculation are the same, on a real model, whatever is asked of it."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from support.tiny_models import VOCAB_SIZE, save_tiny_model
from tidemill.protocol.errors import NoTokenLeft
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill_gpuworker.engine.engine import Engine, StepOutput
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import Output
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.stop_checker import Finish
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampler import LogprobsMode, Sampler
from tidemill_gpuworker.speculation import verification
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

#: Few enough tokens that a random model repeats itself.
FEW = tuple(range(5, 10))
ATOL = 1e-4


class CountingProcessor:
    """Ends an output after ``max_tokens``, or with token 5 after as many as ``min_tokens`` says."""

    def __init__(self, seq: Sequence) -> None:
        self._params = seq.params
        self._num_taken = 0

    def process(self, token_id: int) -> Output:
        self._num_taken += 1
        if token_id in self._params.stop_token_ids:
            return Output("", Finish(FinishReason.STOP, token_id))
        is_last = self._num_taken == self._params.max_tokens
        return Output("", Finish(FinishReason.LENGTH) if is_last else None)

    def replay(self, token_ids: list[int]) -> Output:
        self._num_taken += len(token_ids)
        return Output("", None)


@pytest.fixture(scope="module", params=[pytest.param(4, marks=pytest.mark.slow), 16])
def runner(request: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = save_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    return ModelRunner(Path(directory), dtype="float32", block_size=request.param, num_blocks=256)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "allowed_token_ids": FEW},
    {"temperature": 0.7, "allowed_token_ids": FEW, "top_p": 0.9},
    {"temperature": 0.5, "top_k": 3, "allowed_token_ids": FEW, "repetition_penalty": 1.1},
    {"temperature": 0.0, "allowed_token_ids": FEW, "frequency_penalty": 0.3, "logprobs": 3},
    {"temperature": 1.0, "allowed_token_ids": FEW, "presence_penalty": -0.5, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": FEW, "stop_token_ids": (5,), "min_tokens": 20},
    {"temperature": 0.3, "logit_bias": {6: 30.0, 7: 30.0}, "prompt_logprobs": 1},
]


def make_seqs(seed: int, num: int = 8) -> list[Sequence]:
    draw = random.Random(seed)
    return [make_seq(f"seq-{number}", draw, PARAMS[number % len(PARAMS)]) for number in range(num)]


def make_seq(name: str, draw: random.Random, params: dict[str, Any]) -> Sequence:
    phrase = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 6))]
    prompt = phrase * draw.randint(1, 4) + [draw.choice(FEW) for _ in range(draw.randint(0, 30))]
    return Sequence(
        name,
        prompt,
        SamplingParams(max_tokens=draw.randint(20, 36), **params),
        seed=draw.getrandbits(60),
        priority=draw.choice([0, 0, -1, 1]),
        bad_word_ids=draw.choice([(), ((5, 6),), ((7,), (8, 9, 8))]),
    )


class Run:
    """What came of sequences that arrive one by one."""

    def __init__(
        self, runner: ModelRunner, num_drafted: int, *, num_blocks: int = 256, budget: int = 256
    ) -> None:
        config = StepConfig(
            max_model_len=runner.max_model_len, max_num_seqs=6, max_num_batched_tokens=budget
        )
        drafter = None
        if num_drafted:
            speculation = SpeculativeConfig(
                num_speculative_tokens=num_drafted, prompt_lookup_max=4, prompt_lookup_min=1
            )
            drafter = Drafter(speculation, runner.max_model_len)
        blocks = BlockManager(min(num_blocks, runner.num_blocks), runner.block_size)
        self.scheduler = StepScheduler(config, blocks, drafter)
        sampler = Sampler(logprobs_mode=LogprobsMode.PROCESSED)
        self.engine = Engine(runner, sampler, self.scheduler, CountingProcessor)
        self.finishes: dict[str, Any] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}

    def play(self, seqs: list[Sequence]) -> "Run":
        waiting = list(seqs)
        while waiting or self.engine.has_work:
            if waiting:
                self.engine.add(waiting.pop(0))
            for output in self.engine.step():
                self.take(output)
            self.scheduler.check_integrity()
        assert self.scheduler.block_manager.num_free_blocks == (
            self.scheduler.block_manager.num_blocks
        )
        return self

    def take(self, output: StepOutput) -> None:
        self.logprobs.setdefault(output.seq.seq_id, []).extend(output.logprobs or ())
        if output.finish is not None:
            self.finishes[output.seq.seq_id] = (output.finish.reason, output.finish.stop_reason)


def assert_equal_logprobs(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert (left.rank, [i for i, _ in left.top]) == (right.rank, [i for i, _ in right.top])
        assert left.logprob == pytest.approx(right.logprob, abs=ATOL)


@pytest.mark.parametrize(
    ("seed", "limits"),
    [
        (1, {}),
        (2, {"budget": 12}),
        pytest.param(3, {"num_blocks": 9}, marks=pytest.mark.slow),
        (4, {"num_blocks": 10, "budget": 20}),
    ],
)
def test_speculation_changes_no_token_and_no_logprob(
    runner: ModelRunner, seed: int, limits: dict[str, int]
) -> None:
    if limits.get("num_blocks") and runner.block_size == 4:
        limits = limits | {"num_blocks": limits["num_blocks"] * 4}
    plain_seqs, guessed_seqs = make_seqs(seed), make_seqs(seed)

    plain = Run(runner, 0, **limits).play(plain_seqs)
    guessed = Run(runner, 5, **limits).play(guessed_seqs)

    for left, right in zip(plain_seqs, guessed_seqs, strict=True):
        assert left.output_ids == right.output_ids
        assert_equal_logprobs(plain.logprobs[left.seq_id], guessed.logprobs[right.seq_id])
        assert len(left.prompt_logprobs) == len(right.prompt_logprobs)
    assert plain.finishes == guessed.finishes
    figures = guessed.engine.figures
    assert figures.speculation.num_accepted_tokens > 20
    assert figures.num_steps < plain.engine.figures.num_steps
    assert figures.num_generated_tokens == plain.engine.figures.num_generated_tokens
    if "num_blocks" in limits:
        assert figures.num_preemptions > 0


def test_a_branch_that_nobody_takes_may_lead_nowhere(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing may come behind a 6 that was generated; the model never says one.
    def seq() -> Sequence:
        params = SamplingParams(
            temperature=0.0, max_tokens=8, allowed_token_ids=(6, 7, 8), logit_bias={6: -90.0}
        )
        words = ((6, 6), (6, 7), (6, 8))
        return Sequence("seq", [7, 8, 6, 7, 8, 6, 7], params, seed=0, bad_word_ids=words)

    without = Mock(side_effect=verification._without_drafts)
    monkeypatch.setattr(verification, "_without_drafts", without)
    plain, guessed = seq(), seq()
    Run(runner, 0).play([plain])
    Run(runner, 5).play([guessed])

    assert guessed.output_ids == plain.output_ids
    assert without.called


def test_a_sequence_that_has_no_token_left_fails_as_it_does_without_speculation(
    runner: ModelRunner,
) -> None:
    def seq() -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=(6, 7))
        words = ((6, 6), (6, 7), (7, 6))
        return Sequence("seq", [7, 7, 7, 7, 6], params, seed=0, bad_word_ids=(*words, (7, 7, 7)))

    for num_drafted in (0, 5):
        with pytest.raises(NoTokenLeft):
            Run(runner, num_drafted).play([seq()])
