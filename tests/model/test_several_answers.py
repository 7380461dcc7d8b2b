"""Several outputs of one prompt on a tiny Llama: each is what its choice gives alone."""

from pathlib import Path
from typing import Any

import pytest

from support.tiny_models import save_tiny_model
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill_gpuworker.engine.choice_group import ChoiceGroup, params_of
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import Output
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.stop_checker import Finish
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 16
NUM_TOKENS = 20
PROMPT = [(7 * place) % 500 for place in range(37)]

SPECULATION = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)

Told = dict[tuple[str, int], tuple[list[int], list[TokenLogprobs]]]


class CountingProcessor:
    """Ends an output after ``max_tokens``; has no text."""

    def __init__(self, seq: Sequence) -> None:
        self._num_left = seq.params.max_tokens or NUM_TOKENS

    def process(self, token_id: int) -> Output:
        self._num_left -= 1
        return Output("", None if self._num_left > 0 else Finish(FinishReason.LENGTH))

    def replay(self, token_ids: list[int]) -> Output:
        self._num_left -= len(token_ids)
        return Output("", None if self._num_left > 0 else Finish(FinishReason.LENGTH))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama-tied", directory)
    return ModelRunner(directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64)


def run(runner: ModelRunner, *works: Any, drafter: Drafter | None = None, **config: Any) -> Told:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | config
    num_blocks = limits.pop("num_blocks", runner.num_blocks)
    steps = StepConfig(max_model_len=runner.max_model_len, **limits)
    scheduler = StepScheduler(steps, BlockManager(num_blocks, BLOCK_SIZE), drafter)
    inner = Engine(runner, Sampler(), scheduler, CountingProcessor)
    engine, told = GroupEngine(inner), Told()
    for work in works:
        engine.add(work)
    while inner.has_work:
        for output in engine.step():
            ids, logprobs = told.setdefault(
                (output.seq.seq_id, getattr(output, "choice", 0)), ([], [])
            )
            ids += output.new_ids
            logprobs += output.logprobs or ()
    assert scheduler.block_manager.num_free_blocks == num_blocks
    return told


def make_seq(choice: int, params: SamplingParams, seq_id: str) -> Sequence:
    return Sequence(seq_id, list(PROMPT), params_of(params, choice), seed=77, choice=choice)


def make_group(params: SamplingParams, job_id: str = "job") -> ChoiceGroup:
    sequences = [make_seq(k, params, f"{job_id}#{k}") for k in range(params.num_outputs)]
    return ChoiceGroup(sequences, params)


def make_params(n: int, **options: Any) -> SamplingParams:
    return SamplingParams(n=n, temperature=0.9, max_tokens=NUM_TOKENS, **options)


def alone(runner: ModelRunner, choice: int, params: SamplingParams) -> Told:
    single = params.model_copy(update={"n": 1})
    return run(runner, make_seq(choice, single, "alone"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 3, "presence_penalty": 1.5, "top_p": 0.8, "min_tokens": 5},
    ],
    ids=["plain", "with-all"],
)
def test_each_choice_is_what_it_is_alone(runner: ModelRunner, options: dict[str, Any]) -> None:
    params = make_params(4, **options)
    told = run(runner, make_group(params))
    for choice in range(4):
        ids, logprobs = told["job", choice]
        [(alone_ids, alone_logprobs)] = alone(runner, choice, params).values()
        assert ids == alone_ids
        assert [each.rank for each in logprobs] == [each.rank for each in alone_logprobs]
        assert [each.logprob for each in logprobs] == pytest.approx(
            [each.logprob for each in alone_logprobs], abs=1e-5
        )
    assert len({tuple(ids) for ids, _ in told.values()}) == 4


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 2},
        {"num_blocks": 8},
        {"max_num_batched_tokens": 16},
        {"drafter": Drafter(SPECULATION, 512)},
    ],
    ids=["two-places", "eight-blocks", "chunks", "speculation"],
)
def test_choices_do_not_depend_on_how_they_run(runner: ModelRunner, config: dict[str, Any]) -> None:
    params = make_params(4)
    groups = [make_group(params, "a"), make_group(make_params(3, logprobs=0), "b")]
    told = run(runner, *groups, **config)
    expected = run(runner, make_group(params))
    for (job_id, choice), (ids, _) in told.items():
        assert ids == expected["job", choice][0], (job_id, choice)
    assert len(told) == 7


def test_the_prompt_is_scored_once(runner: ModelRunner) -> None:
    group = make_group(make_params(3, prompt_logprobs=2))
    run(runner, group)
    assert len(group.lead.prompt_logprobs) == len(PROMPT)
    single = make_seq(0, make_params(1, prompt_logprobs=2), "alone")
    run(runner, single)
    assert [p and p.top for p in group.lead.prompt_logprobs] == [
        p and p.top for p in single.prompt_logprobs
    ]
