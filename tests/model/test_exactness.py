"""The promise of exact tokens: the real model in float32 against transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from support.greedy import GreedyRun, generate_greedily, reference_logits, reference_outputs
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.steps.step_config import StepConfig

pytestmark = pytest.mark.model

NUM_TOKENS = 16
#: Two tokens whose float64 logits are closer than this may swap by rounding alone.
MAX_TIE = 1e-4
LICENSE = Path(__file__).parents[2] / "LICENSE"
QUESTIONS = (
    "What is the capital of France?",
    "List three prime numbers.",
    "Why is the sky blue?",
    "Write a haiku about the tide.",
    "Translate 'good morning' to Spanish.",
    "What does a mill do?",
)
TEXTS = (
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Naïve café, 東京 and 🙂:",
)


@dataclass(frozen=True)
class Reference:
    """The prompts and what transformers generates for each of them."""

    prompts: list[list[int]]
    outputs: list[list[int]]


def make_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return 26 prompts of 1 to 1,500 tokens; several share long beginnings."""
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    short = [encode(text) for text in (*chats, *TEXTS)]
    book = encode(LICENSE.read_text())
    cuts = [book[start : start + length] for start, length in ((0, 1), (9, 2), (7, 65), (900, 127))]
    # Four questions about one document, one about its first half, and the document twice.
    document = book[1600:1840]
    shared = [document + ids for ids in short[:4]] + [document[:120] + short[4], document, document]
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randint(1000, 40000, (n,), generator=generator).tolist() for n in (15, 33)]
    return [book[:1500], *short, *cuts, book[300:715], *shared, *noise]


@cache
def float64_model(model_dir: Path) -> transformers.PreTrainedModel:
    """Return the judge of ties; only loaded when two outputs differ."""
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()


@pytest.fixture(scope="session")
def reference(demo_model_dir: Path) -> Reference:
    """Computed once for all block sizes."""
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    prompts = make_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    outputs = reference_outputs(model.eval(), prompts, NUM_TOKENS, num_at_once=8)
    return Reference(prompts, outputs)


def test_the_prompts_are_as_varied_as_promised(reference: Reference) -> None:
    lengths = sorted(len(prompt) for prompt in reference.prompts)
    assert len(lengths) >= 24
    assert (lengths[0], lengths[-1]) == (1, 1500)


@pytest.mark.parametrize(
    "block_size", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 32))]
)
def test_greedy_tokens_are_those_of_transformers(
    block_size: int, reference: Reference, demo_model_dir: Path
) -> None:
    run = run_crowded(demo_model_dir, block_size, reference.prompts)

    ties = [
        tie_after_divergence(demo_model_dir, prompt, expected, actual)
        for prompt, expected, actual in zip(
            reference.prompts, reference.outputs, run.outputs, strict=True
        )
    ]
    print(f"block size {block_size}: {run.num_steps} steps, up to {run.largest_batch} at once,")
    print(f"{run.num_chunked} partial prefills, {run.num_hit_tokens} tokens from the prefix cache,")
    print(f"{run.num_preemptions} preemptions, ties {[tie for tie in ties if tie is not None]}")
    assert run.largest_batch >= 8
    assert run.num_chunked > 0
    assert run.num_hit_tokens >= 4 * 224
    assert run.num_preemptions > 0


def run_crowded(model_dir: Path, block_size: int, prompts: list[list[int]]) -> GreedyRun:
    """Generate for all prompts at once, with a pool that is too small for them."""
    runner = ModelRunner(
        model_dir,
        dtype="float32",
        block_size=block_size,
        num_blocks=1600 // block_size,
        max_model_len=1600,
        num_threads=2,
    )
    config = StepConfig(max_model_len=1600, max_num_batched_tokens=200, max_num_seqs=32)
    return generate_greedily(runner, prompts, NUM_TOKENS, config)


def tie_after_divergence(
    model_dir: Path, prompt: list[int], expected: list[int], actual: list[int]
) -> float | None:
    """Return None if the outputs agree, else the tie that excuses them; fails if none does."""
    if expected == actual:
        return None
    pairs = zip(expected, actual, strict=True)
    place = next(index for index, (a, b) in enumerate(pairs) if a != b)
    logits = reference_logits(float64_model(model_dir), prompt, expected[: place + 1])[-1]
    best = logits.topk(2)
    rivals = {expected[place], actual[place]}
    assert rivals == set(best.indices.tolist()), f"{rivals} are not the two best tokens"
    gap = float(best.values[0] - best.values[1])
    assert gap < MAX_TIE, f"token {place} after a prompt of {len(prompt)} differs: gap {gap}"
    return gap
