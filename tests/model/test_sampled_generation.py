"""Penalties and logprobs through the whole engine, against transformers on a tiny Llama."""

from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill_gpuworker.engine import prompt_scorer
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import Output
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.stop_checker import Finish
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 16
NUM_TOKENS = 24


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


class Rig:
    """An engine on a tiny Llama, and the logprobs that it told of each sequence."""

    def __init__(
        self, runner: ModelRunner, *, num_blocks: int | None = None, max_step_tokens: int = 512
    ) -> None:
        config = StepConfig(
            max_model_len=runner.max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=max_step_tokens,
        )
        blocks = BlockManager(num_blocks or runner.num_blocks, BLOCK_SIZE)
        self.scheduler = StepScheduler(config, blocks)
        self.engine = Engine(runner, Sampler(), self.scheduler, CountingProcessor)
        self.logprobs: dict[str, list[TokenLogprobs]] = {}

    def run(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.engine.add(seq)
        while self.engine.has_work:
            self.step()

    def step(self) -> None:
        for output in self.engine.step():
            self.logprobs.setdefault(output.seq.seq_id, []).extend(output.logprobs or ())


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_tiny_model("llama-tied")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = save_tiny_model("llama-tied", tmp_path_factory.mktemp("llama"))
    return ModelRunner(Path(directory), dtype="float32", block_size=BLOCK_SIZE, num_blocks=128)


def make_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def make_seq(name: str, prompt: list[int], output: Several[int] = (), **params: Any) -> Sequence:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS} | params
    return Sequence(name, list(prompt), SamplingParams(**options), seed=0, output_ids=list(output))


class CountPenalties(transformers.LogitsProcessor):  # type: ignore[misc]  # it is untyped
    """presence_penalty and frequency_penalty by OpenAI's formula, which transformers lacks."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self._prompt_len, self._presence, self._frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_len :], minlength=VOCAB_SIZE)
        return scores - self._frequency * counts - self._presence * (counts > 0)


PENALTIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    "bias": (
        {"logit_bias": {7: 4.0, 90: -6.0}},
        {"sequence_bias": [[[7], 4.0], [[90], -6.0]]},
    ),
    "allowed": (
        {"allowed_token_ids": list(range(60))},
        {"suppress_tokens": list(range(60, VOCAB_SIZE))},
    ),
    "bias-and-repetition": (
        {"logit_bias": {7: 4.0}, "repetition_penalty": 0.7},
        {"sequence_bias": [[[7], 4.0]], "repetition_penalty": 0.7},
    ),
}


def reference(
    model: transformers.PreTrainedModel, prompt: list[int], options: dict[str, Any]
) -> list[int]:
    model.generation_config.eos_token_id = None
    ids: torch.Tensor = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return [int(token) for token in ids[0, len(prompt) :]]


def test_greedy_outputs_with_penalties_are_those_of_transformers_in_one_batch(
    model: transformers.PreTrainedModel, runner: ModelRunner
) -> None:
    prompts = {name: make_prompt(10 + 7 * place, place) for place, name in enumerate(PENALTIES)}
    seqs = [make_seq(name, prompts[name], **PENALTIES[name][0]) for name in PENALTIES]
    plain = make_seq("plain", prompts["repetition"])
    Rig(runner).run(*seqs, plain)
    for seq in seqs:
        wanted = reference(model, prompts[seq.seq_id], PENALTIES[seq.seq_id][1])
        assert seq.output_ids == wanted, seq.seq_id
        assert seq.output_ids != reference(model, prompts[seq.seq_id], {}), seq.seq_id
    assert plain.output_ids == reference(model, plain.prompt_ids, {})


def test_presence_and_frequency_penalties_follow_the_formula_in_transformers_loop(
    model: transformers.PreTrainedModel, runner: ModelRunner
) -> None:
    prompt = make_prompt(20, 4)
    for presence, frequency in ((-2.0, 0.5), (1.5, -1.0), (-1.0, -0.5)):
        seq = make_seq("s", prompt, presence_penalty=presence, frequency_penalty=frequency)
        Rig(runner).run(seq)
        processors = transformers.LogitsProcessorList(
            [CountPenalties(len(prompt), presence, frequency)]
        )
        assert seq.output_ids == reference(model, prompt, {"logits_processor": processors})
    assert seq.output_ids != reference(model, prompt, {})


@torch.inference_mode()
def reference_logprobs(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float64 log-softmax of the logits after each token, [tokens, vocabulary]."""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits
    return logits[0].double().log_softmax(dim=-1)


def check_logprobs(told: Several[TokenLogprobs | None], ids: list[int], rows: torch.Tensor) -> None:
    """``rows`` are the distributions from which ``ids`` came."""
    assert len(told) == len(ids) == len(rows)
    for logprobs, token, row in zip(told, ids, rows, strict=True):
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(row[token].item(), abs=1e-4)
        likeliest = row.topk(len(logprobs.top)).values.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(likeliest, abs=1e-4)
        named = [row[token].item() for token, _ in logprobs.top]
        assert named == pytest.approx(likeliest, abs=1e-4)


def check_prompt(seq: Sequence, model: transformers.PreTrainedModel) -> None:
    first, *rest = seq.prompt_logprobs
    assert first is None
    check_logprobs(rest, seq.prompt_ids[1:], reference_logprobs(model, seq.prompt_ids)[:-1])


@pytest.mark.parametrize("max_step_tokens", [512, 16])
def test_logprobs_of_prompt_and_output_are_those_of_the_full_forward_pass(
    model: transformers.PreTrainedModel, runner: ModelRunner, max_step_tokens: int
) -> None:
    rig = Rig(runner, max_step_tokens=max_step_tokens)
    seqs = [
        make_seq(str(length), make_prompt(length, length), logprobs=3, prompt_logprobs=num_top)
        for length, num_top in ((1, 0), (16, 2), (33, 5), (75, -1))
    ]
    rig.run(*seqs)
    for seq in seqs:
        check_prompt(seq, model)
        rows = reference_logprobs(model, seq.prompt_ids + seq.output_ids)
        check_logprobs(rig.logprobs[seq.seq_id], seq.output_ids, rows[len(seq.prompt_ids) - 1 : -1])


def test_a_cached_prefix_is_computed_again_for_its_logprobs(
    model: transformers.PreTrainedModel, runner: ModelRunner
) -> None:
    rig = Rig(runner)
    prompt = make_prompt(70, 1)
    plain, scored, after = (
        make_seq("plain", prompt),
        make_seq("scored", prompt, prompt_logprobs=1),
        make_seq("after", prompt),
    )
    for seq in (plain, scored, after):
        rig.run(seq)
    check_prompt(scored, model)
    assert (scored.num_cached_tokens, after.num_cached_tokens) == (0, 64)
    assert plain.output_ids == scored.output_ids == after.output_ids


def test_prompt_logprobs_survive_preemptions(
    model: transformers.PreTrainedModel, runner: ModelRunner
) -> None:
    # Two of them do not fit together once they have grown.
    rig = Rig(runner, num_blocks=11, max_step_tokens=32)
    seqs = [
        make_seq(str(seed), make_prompt(70, seed), max_tokens=40, prompt_logprobs=2)
        for seed in range(2)
    ]
    rig.run(*seqs)
    assert rig.scheduler.num_preemptions > 0
    for seq in seqs:
        check_prompt(seq, model)


def test_a_resumed_sequence_tells_the_same_of_prompt_and_output(runner: ModelRunner) -> None:
    options: dict[str, Any] = {
        "logprobs": 2,
        "prompt_logprobs": 2,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "temperature": 1.0,
    }
    prompt = make_prompt(40, 5)
    rig = Rig(runner)
    whole = make_seq("whole", prompt, **options)
    rig.run(whole)
    for cut in (1, 9, NUM_TOKENS - 1):
        resumed = make_seq("resumed", prompt, whole.output_ids[:cut], **options)
        again = Rig(runner)
        again.run(resumed)
        assert resumed.output_ids == whole.output_ids
        assert_close(resumed.prompt_logprobs, whole.prompt_logprobs)
        assert_close(again.logprobs["resumed"], rig.logprobs["whole"][cut:])


def test_a_complete_output_ends_once_the_prompts_logprobs_are_known(
    model: transformers.PreTrainedModel, runner: ModelRunner
) -> None:
    output = make_prompt(NUM_TOKENS, 6)
    rig = Rig(runner, max_step_tokens=16)
    seq = make_seq("s", make_prompt(40, 5), output, prompt_logprobs=1)
    rig.engine.add(seq)
    told = [each for _ in range(3) for each in rig.engine.step()]
    assert [(each.seq, each.new_ids) for each in told] == [(seq, ())]
    assert told[0].finish == Finish(FinishReason.LENGTH)
    check_prompt(seq, model)
    assert seq.output_ids == output
    assert not rig.engine.has_work
    assert rig.scheduler.block_manager.num_free_blocks == runner.num_blocks


def assert_close(
    ours: Several[TokenLogprobs | None], wanted: Several[TokenLogprobs | None]
) -> None:
    def values(told: Several[TokenLogprobs | None]) -> list[float]:
        return [number for each in told if each for _, number in [(0, each.logprob), *each.top]]

    assert [each is None for each in ours] == [each is None for each in wanted]
    assert values(ours) == pytest.approx(values(wanted), abs=1e-5)


def test_a_step_that_fails_leaves_prompt_logprobs_right(
    model: transformers.PreTrainedModel, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(runner, max_step_tokens=32)
    seq = make_seq("s", make_prompt(80, 8), prompt_logprobs=1)
    rig.engine.add(seq)
    rig.step()
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", broken)
        rig.step()
        with pytest.raises(RuntimeError, match="planted"):
            rig.step()
    assert len(seq.prompt_logprobs) == 80
    assert not seq.output_ids
    while rig.engine.has_work:
        rig.step()
    check_prompt(seq, model)


def broken(*_: object) -> None:
    raise RuntimeError("planted")


def test_logits_of_a_long_prompt_are_made_in_slices(
    model: transformers.PreTrainedModel, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scorer, "_MAX_LOGITS", 7 * VOCAB_SIZE)
    seq = make_seq("s", make_prompt(50, 2), prompt_logprobs=3)
    sizes: list[int] = []
    make_logits = runner._model.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return make_logits(hidden)

    monkeypatch.setattr(runner._model, "logits", spy)
    Rig(runner).run(seq)
    assert sizes[:8] == [7] * 7 + [1]
    check_prompt(seq, model)
