"""Budgets of reasoning through the whole engine, against a plain loop over transformers' logits."""

import json
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.tiny_chat_model import save_tiny_chat_model
from support.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import FinishReason
from tidemill.service.config import load_config
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.output_processor import Output
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.stop_checker import Finish
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.options.command_line import parse_config
from tidemill_gpuworker.sampling.sampler import Sampler
from tidemill_gpuworker.sampling.thinking import ReasoningMarkers
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE, NUM_TOKENS = 16, 24
OPEN, CLOSE = 7, 8
#: Few tokens, so that a random model repeats itself and drafts come true, and opens again.
FEW = (3, 4, 5, OPEN, CLOSE)
BIAS = {OPEN: 1.5, CLOSE: -3.0}


class CountingProcessor:
    """Ends an output after so many tokens; has no text."""

    def __init__(self, seq: Sequence) -> None:
        self._num_left = NUM_TOKENS

    def process(self, token_id: int) -> Output:
        return self.replay([token_id])

    def replay(self, token_ids: list[int]) -> Output:
        self._num_left -= len(token_ids)
        return Output("", None if self._num_left > 0 else Finish(FinishReason.LENGTH))


def play(
    runner: ModelRunner, seqs: Several[Sequence], *, num_blocks: int = 128, num_drafted: int = 0
) -> StepScheduler:
    """Run sequences to their ends, all in one engine."""
    config = StepConfig(
        max_model_len=runner.max_model_len, max_num_seqs=16, max_num_batched_tokens=64
    )
    drafter = None
    if num_drafted:
        speculation = SpeculativeConfig(
            num_speculative_tokens=num_drafted, prompt_lookup_max=3, prompt_lookup_min=1
        )
        drafter = Drafter(speculation, runner.max_model_len)
    scheduler = StepScheduler(config, BlockManager(num_blocks, BLOCK_SIZE), drafter)
    sampler = Sampler(markers=ReasoningMarkers(OPEN, CLOSE))
    engine = Engine(runner, sampler, scheduler, CountingProcessor)
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        engine.step()
    return scheduler


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_tiny_model("llama-tied")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = save_tiny_model("llama-tied", tmp_path_factory.mktemp("llama"))
    return ModelRunner(Path(directory), dtype="float32", block_size=BLOCK_SIZE, num_blocks=128)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(10, VOCAB_SIZE, (5, 20), generator=generator).tolist()
    endings = ([OPEN], [OPEN, 3], [OPEN, 3, CLOSE], [], [CLOSE, OPEN, *[4] * 9])
    return [ids + ending for ids, ending in zip(drawn, endings, strict=True)]


def make_seqs(temperature: float = 0.0, output: Several[Several[int]] = ()) -> list[Sequence]:
    seqs = []
    for place, prompt in enumerate(make_prompts()):
        params: dict[str, Any] = {"allowed_token_ids": FEW, "logit_bias": BIAS}
        params |= {"max_tokens": NUM_TOKENS, "temperature": temperature}
        params |= {"thinking_token_budget": (6, 0, 3, 4, 9)[place]}
        known = list(output[place]) if output else []
        seqs.append(
            Sequence(str(place), prompt, SamplingParams(**params), seed=place, output_ids=known)
        )
    return seqs


@torch.inference_mode()
def looped(model: transformers.PreTrainedModel, prompt: list[int], budget: int | None) -> list[int]:
    """Greedy tokens, one forward pass over everything for each."""
    ids = list(prompt)
    bias = torch.full((VOCAB_SIZE,), float("-inf"))
    bias[list(FEW)] = 0.0
    for token, value in BIAS.items():
        bias[token] += value
    while len(ids) < len(prompt) + NUM_TOKENS:
        behind = ids[::-1]
        num_open = behind.index(OPEN) if OPEN in behind else len(ids)
        num_closed = behind.index(CLOSE) if CLOSE in behind else len(ids)
        if budget is not None and num_open < num_closed and num_open >= budget:
            ids.append(CLOSE)
        else:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int((logits + bias).argmax()))
    return ids[len(prompt) :]


def test_tokens_are_those_of_the_plain_loop(
    model: transformers.PreTrainedModel, runner: ModelRunner
) -> None:
    wanted = [
        looped(model, seq.prompt_ids, seq.params.thinking_token_budget) for seq in make_seqs()
    ]
    unbounded = [looped(model, prompt, None) for prompt in make_prompts()]
    assert sum(one != other for one, other in zip(wanted, unbounded, strict=True)) >= 3
    for num_drafted in (0, 4):
        seqs = make_seqs()
        scheduler = play(runner, seqs, num_drafted=num_drafted)
        assert [seq.output_ids for seq in seqs] == wanted
    assert scheduler.speculation.num_accepted_tokens > 10


def test_batches_drafts_preemptions_and_takeovers_change_no_token(runner: ModelRunner) -> None:
    wanted, temperature = [], 0.9
    for seq in make_seqs(temperature):
        play(runner, [seq])
        wanted.append(seq.output_ids)
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    for options in ({}, {"num_drafted": 4}, {"num_blocks": 10, "num_drafted": 4}):
        seqs = make_seqs(temperature)
        scheduler = play(runner, seqs, **options)
        assert [seq.output_ids for seq in seqs] == wanted, options
        assert bool(scheduler.num_preemptions) == ("num_blocks" in options)
    for size in (1, 9):
        seqs = make_seqs(temperature, [ids[:size] for ids in wanted])
        play(runner, seqs, num_drafted=2)
        assert [seq.output_ids for seq in seqs] == wanted


def test_the_answers_of_one_job_have_a_budget_each(runner: ModelRunner) -> None:
    alone = make_seqs(0.9)[0]
    play(runner, [alone])
    leader, follower = make_seqs(0.9)[0], make_seqs(0.9)[0]
    follower.seq_id, follower.choice = "other", 1
    leader.followers = [follower]
    play(runner, [leader], num_drafted=4)
    assert leader.output_ids == alone.output_ids != follower.output_ids
    for seq in (leader, follower):
        part = seq.output_ids[: seq.output_ids.index(CLOSE)]
        assert len(part[-1 - part[::-1].index(OPEN) if OPEN in part else 0 :]) <= 6


def test_a_model_is_served_with_the_markers_of_its_template(tmp_path: Path) -> None:
    directory = save_tiny_chat_model(tmp_path)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    first = 300
    for place, text in enumerate(("<think>", "</think>")):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        token = {"id": first + place, "content": text, "special": True} | flags
        tokenizer["added_tokens"].append(token)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{# <think></think> #}"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = ["--model", str(directory), "--redis-url", "redis://h", "--num-gpu-blocks-override"]
    served = load_model(parse_config([*flags, "16", "--max-model-len", "64"], load_config({})))

    [begin, end] = served.card.reasoning_ids
    texts = [Tokenizer.from_directory(directory).decode([i], False) for i in (begin, end)]
    assert texts == ["<think>", "</think>"]
    params = SamplingParams(temperature=0.0, max_tokens=4, thinking_token_budget=2)
    seq = Sequence("s", [1, begin], params, seed=0)
    served.engine.add(seq)
    while served.engine.has_work:
        served.engine.step()
    assert (seq.output_ids.index(end), len(seq.output_ids)) == (2, 4)
