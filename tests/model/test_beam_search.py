"""Beam search on a tiny Llama, against transformers where both mean the same.

With every output of the same length, the length penalty changes no order, so scores are sums of
logprobs here and there.  transformers counts an EOS token only among the ``num_beams`` likeliest
continuations, and ends by a rule of its own: outputs with EOS are held against all outputs there
are instead.
"""

from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill_gpuworker.engine.beam_choice import BeamChoice
from tidemill_gpuworker.engine.beam_group import BeamGroup, beam_params
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.group_output import GroupOutput
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import Output
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.stop_checker import Finish
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 16
NUM_TOKENS = 12
PROMPTS = [[5, 6, 7], list(range(20, 37)), list(range(100, 116))]


class CountingProcessor:
    """Ends an output after ``max_tokens`` or with EOS; has no text."""

    def __init__(self, seq: Sequence) -> None:
        self._most = seq.params.max_tokens or NUM_TOKENS

    def process(self, token_id: int) -> Output:
        raise AssertionError("nobody processes single tokens of a beam")

    def replay(self, token_ids: list[int]) -> Output:
        reason = FinishReason.LENGTH if len(token_ids) == self._most else FinishReason.STOP
        return Output("", Finish(reason))


class Rig:
    """An engine for groups on the tiny Llama."""

    def __init__(
        self, runner: ModelRunner, *, num_blocks: int | None = None, max_num_seqs: int = 16
    ) -> None:
        config = StepConfig(
            max_model_len=runner.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
        )
        self.blocks = BlockManager(num_blocks or runner.num_blocks, BLOCK_SIZE)
        self.scheduler = StepScheduler(config, self.blocks)
        self.inner = Engine(runner, Sampler(), self.scheduler, CountingProcessor)
        self.engine = GroupEngine(self.inner)
        self.most_used = 0

    def search(self, *groups: BeamGroup) -> dict[str, list[tuple[list[int], float]]]:
        for group in groups:
            self.engine.add(group)
        told: dict[str, dict[int, list[int]]] = {}
        scores: dict[str, list[float]] = {}
        while self.inner.has_work:
            for output in self.engine.step():
                assert isinstance(output, GroupOutput)
                if output.new_ids:
                    told.setdefault(output.seq.seq_id, {})[output.choice] = list(output.new_ids)
                if output.finish is not None:
                    scores[output.seq.seq_id] = [end.score or 0.0 for end in output.ends]
            self.scheduler.check_integrity()
            used = self.blocks.num_blocks - self.blocks.num_free_blocks
            self.most_used = max(self.most_used, used)
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        return {
            job: [(told[job][choice], score) for choice, score in enumerate(found)]
            for job, found in scores.items()
        }


@pytest.fixture(scope="module")
def llama() -> transformers.PreTrainedModel:
    return make_tiny_model("llama-tied")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama-tied", directory)
    return ModelRunner(directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=256)


def make_group(
    prompt: list[int],
    width: int,
    *,
    job_id: str = "job",
    eos: Several[int] = (),
    num_tokens: int = NUM_TOKENS,
    **options: Any,
) -> BeamGroup:
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=not eos,
        **options,
    )
    root = Sequence(
        f"{job_id}#0", prompt, beam_params(params), 0, is_beam=True, num_published_chars=0
    )
    choice = BeamChoice(
        width,
        prompt_len=len(prompt),
        max_tokens=num_tokens,
        eos_token_ids=eos,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    return BeamGroup(root, params, choice)


def by_transformers(
    model: transformers.PreTrainedModel, prompt: list[int], width: int
) -> list[tuple[list[int], float]]:
    """The best beams and the sums of their logprobs."""
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        min_new_tokens=NUM_TOKENS,
        max_new_tokens=NUM_TOKENS,
        length_penalty=0.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = found.sequences[:, len(prompt) :].tolist()
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


def check(found: list[tuple[list[int], float]], expected: list[tuple[list[int], float]]) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], abs=1e-4)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_beams_equal_those_of_transformers(
    runner: ModelRunner, llama: transformers.PreTrainedModel, prompt: list[int], width: int
) -> None:
    [found] = Rig(runner).search(make_group(prompt, width, length_penalty=0.0)).values()
    check(found, by_transformers(llama, prompt, width))


@pytest.mark.parametrize("changes", [{"max_num_seqs": 2}, {"num_blocks": 5}], ids=str)
def test_beams_without_room_for_all_of_them_are_the_same(
    runner: ModelRunner, llama: transformers.PreTrainedModel, changes: dict[str, int]
) -> None:
    rig = Rig(runner, **changes)
    groups = [
        make_group(prompt, 4, job_id=str(number), length_penalty=0.0)
        for number, prompt in enumerate(PROMPTS)
    ]
    found = rig.search(*groups)
    assert rig.scheduler.num_preemptions
    for number, prompt in enumerate(PROMPTS):
        check(found[str(number)], by_transformers(llama, prompt, 4))


def test_beams_share_the_blocks_of_what_they_have_in_common(runner: ModelRunner) -> None:
    rig = Rig(runner)
    prompt = [token % VOCAB_SIZE for token in range(7, 7 + 8 * BLOCK_SIZE + 3)]
    rig.search(make_group(prompt, 4))
    # The whole blocks of the prompt once, and one or two of each beam's own.
    assert rig.most_used <= 8 + 4 * 2
    assert rig.blocks.num_forked > 0
    assert rig.inner.figures.num_prompt_tokens == len(prompt)


@pytest.fixture(scope="module")
def tables(llama: transformers.PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the first token, [vocab], and of the second after each first, [vocab, vocab]."""
    rows = torch.tensor([[*PROMPTS[0], token] for token in range(VOCAB_SIZE)])
    with torch.no_grad():
        logits = llama(rows).logits.double()
    return logits[0, len(PROMPTS[0]) - 1].log_softmax(0), logits[:, -1].log_softmax(1)


def best_outputs(
    tables: tuple[torch.Tensor, torch.Tensor], eos: int, num: int, penalty: float
) -> list[tuple[list[int], float]]:
    """The best of all outputs of two tokens, or of one if it is EOS."""
    first, second = tables
    lengths = torch.full((VOCAB_SIZE,), len(PROMPTS[0]) + 2.0).double()
    lengths[eos] -= 1
    scores = (first[:, None] + second) / lengths**penalty
    scores[eos] = -torch.inf
    best = scores.flatten().topk(num)
    rated = [
        ([index // VOCAB_SIZE, index % VOCAB_SIZE], score)
        for index, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    rated.append(([eos], first[eos].item() / len(PROMPTS[0]) ** penalty))
    return sorted(rated, key=lambda pair: -pair[1])[:num]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 8.0])
def test_the_best_of_all_short_outputs_are_found(
    runner: ModelRunner, tables: tuple[torch.Tensor, torch.Tensor], penalty: float
) -> None:
    eos = int(tables[0].argsort(descending=True)[1])
    group = make_group(
        PROMPTS[0], 8, eos=[eos], num_tokens=2, length_penalty=penalty, early_stopping="never"
    )
    [found] = Rig(runner).search(group).values()
    check(found[:2], best_outputs(tables, eos, 2, penalty))
