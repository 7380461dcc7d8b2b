"""Every family of the native path against transformers, on small random models in float32."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.golden_runs import check_run
from support.greedy import generate_greedily, reference_logits, reference_outputs
from support.tiny_models import CONFIGS, VOCAB_SIZE, make_tiny_model, save_tiny_model
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.steps.step_config import StepConfig

EMBEDDING = "model.embed_tokens.weight"
NUM_TOKENS = 12
LENGTHS = (1, 2, 7, 16, 33, 130)
SHARED = 37


def make_prompts() -> list[list[int]]:
    """Prompts of odd lengths; the last two share a prefix that ends inside a block."""
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    prefix = draw[-1][:SHARED]
    return [*draw, prefix + draw[2], prefix + draw[3]]


def make_runner(model_dir: Path, *, block_size: int = 16, num_blocks: int = 64) -> ModelRunner:
    return ModelRunner(
        model_dir, dtype="float32", block_size=block_size, num_blocks=num_blocks, num_threads=2
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_in_chunks_gives_the_tokens_and_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    runner = make_runner(save_tiny_model(name, tmp_path))
    model, prompts = make_tiny_model(name), make_prompts()
    config = StepConfig(max_model_len=256, max_num_batched_tokens=48, max_num_seqs=8)

    run = generate_greedily(runner, prompts, NUM_TOKENS, config)

    assert run.num_chunked > 0
    assert run.num_hit_tokens > 0
    assert run.outputs == reference_outputs(model, prompts, NUM_TOKENS)
    for prompt, output, logits in zip(prompts, run.outputs, run.logits, strict=True):
        expected = reference_logits(model, prompt, output)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("stored", ["another head", "the same head", "a head alone"])
def test_the_head_is_the_embedding_where_it_is_for_transformers(
    stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_model("llama-tied", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors[EMBEDDING]
    tensors["lm_head.weight"] = embedding.flip(0) if stored == "another head" else embedding.clone()
    if stored == "a head alone":
        del tensors[EMBEDDING]
    save_file(tensors, path, {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = StepConfig(max_model_len=256, max_num_batched_tokens=48, max_num_seqs=8)
    prompts = make_prompts()[:3]

    run = generate_greedily(make_runner(tmp_path), prompts, 2, config)

    check_run(model.eval(), prompts, run)
    assert ("another lm_head.weight" in caplog.text) == (stored == "another head")


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 128])
def test_the_block_size_changes_no_token(block_size: int, tmp_path: Path) -> None:
    num_blocks = 1024 // block_size
    runner = make_runner(
        save_tiny_model("llama-tied", tmp_path), block_size=block_size, num_blocks=num_blocks
    )
    prompts = make_prompts()
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=8)

    run = generate_greedily(runner, prompts, NUM_TOKENS, config)

    assert run.outputs == reference_outputs(make_tiny_model("llama-tied"), prompts, NUM_TOKENS)


def test_preempted_sequences_generate_the_same_tokens(tmp_path: Path) -> None:
    runner = make_runner(save_tiny_model("llama-tied", tmp_path), block_size=4, num_blocks=44)
    prompts = make_prompts()
    config = StepConfig(max_model_len=160, max_num_batched_tokens=64, max_num_seqs=8)

    run = generate_greedily(runner, prompts, NUM_TOKENS, config)

    assert run.num_preemptions > 0
    assert run.outputs == reference_outputs(make_tiny_model("llama-tied"), prompts, NUM_TOKENS)


def test_bfloat16_logits_are_as_close_to_float64_as_those_of_transformers(tmp_path: Path) -> None:
    runner = ModelRunner(
        save_tiny_model("llama-tied", tmp_path), dtype="bfloat16", num_blocks=64, num_threads=2
    )
    prompts = make_prompts()
    config = StepConfig(max_model_len=256, max_num_batched_tokens=48, max_num_seqs=8)
    exact = make_tiny_model("llama-tied").double()
    rounded = make_tiny_model("llama-tied").bfloat16()

    run = generate_greedily(runner, prompts, NUM_TOKENS, config)

    ours = theirs = 0.0
    for prompt, output, logits in zip(prompts, run.outputs, run.logits, strict=True):
        expected = reference_logits(exact, prompt, output)
        ours += float((logits.double() - expected).square().sum())
        theirs += float((reference_logits(rounded, prompt, output) - expected).square().sum())
    assert ours < 1.5 * theirs
