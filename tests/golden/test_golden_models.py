"""Every native architecture against transformers, on small random models in float32."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from support.golden_models import (
    GOLDEN,
    VOCAB_SIZE,
    WINDOW,
    make_golden_model,
    save_golden_model,
)
from support.greedy import GreedyRun, generate_greedily, reference_logits, reference_outputs
from tidemill_gpuworker.model_config import SUPPORTED_ARCHITECTURES, load_model_config
from tidemill_gpuworker.model_runner import ModelRunner
from tidemill_gpuworker.step_config import StepConfig

ATOL = 1e-4


def make_prompts(lengths: Sequence[int], shared: int) -> list[list[int]]:
    """Random prompts; the last two begin with ``shared`` tokens of the longest."""
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    prefix = max(draw, key=len)[:shared]
    return [*draw, prefix + draw[0], prefix + draw[1]]


def make_runner(name: str, model_dir: Path, block_size: int) -> ModelRunner:
    return ModelRunner(
        model_dir,
        dtype="float32",
        block_size=block_size,
        num_blocks=2048 // block_size,
        max_model_len=GOLDEN[name].max_model_len,
        num_threads=2,
    )


def check_run(
    model: transformers.PreTrainedModel, prompts: list[list[int]], run: GreedyRun
) -> float:
    """Assert that each token is transformers' choice after the same tokens; return the error."""
    worst = 0.0
    for prompt, output, logits in zip(prompts, run.outputs, run.logits, strict=True):
        expected = reference_logits(model, prompt, output)
        assert output == expected.argmax(dim=-1).tolist()
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0.0)
        worst = max(worst, float((logits - expected).abs().max()))
    return worst


@pytest.mark.parametrize("name", GOLDEN)
def test_chunks_and_prefix_hits_give_the_logits_and_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    runner = make_runner(name, save_golden_model(model, tmp_path), 16)
    prompts = make_prompts((3, 21, 2 * WINDOW + 7), shared=WINDOW + 9)
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)

    runner.warm_up()
    run = generate_greedily(runner, prompts, 5, config)

    assert run.num_chunked > 0
    assert run.num_hit_tokens > 0
    assert run.largest_batch > 1
    print(f"{name}: largest difference of logits {check_run(model, prompts, run):.1e}")


def test_every_supported_architecture_has_a_golden_model() -> None:
    models = {golden.model_class or f"{golden.family}ForCausalLM" for golden in GOLDEN.values()}
    assert models == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", GOLDEN)
def test_batches_of_any_size_generate_what_transformers_does(
    name: str, block_size: int, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    runner = make_runner(
        name, save_golden_model(model, tmp_path, max_shard_size="60KB"), block_size
    )
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 97, 130)
    prompts = make_prompts(lengths, shared=70)
    expected = reference_outputs(model, prompts, 12)
    for num_seqs, budget in ((1, 256), (16, 48), (16, 512)):
        config = StepConfig(max_model_len=256, max_num_batched_tokens=budget, max_num_seqs=num_seqs)
        run = generate_greedily(runner, prompts, 12, config)
        assert run.outputs == expected
        check_run(model, prompts, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen2 moe", "gpt oss"])
def test_preempted_sequences_generate_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = make_golden_model(name)
    runner = ModelRunner(
        save_golden_model(model, tmp_path), dtype="float32", num_blocks=14, num_threads=2
    )
    prompts = make_prompts((40, 50, 60, 70, 80), shared=20)
    config = StepConfig(max_model_len=160, max_num_batched_tokens=64, max_num_seqs=8)
    run = generate_greedily(runner, prompts, 24, config)
    assert run.num_preemptions > 0
    check_run(model, prompts, run)


@pytest.mark.parametrize(
    ("name", "windows", "freeable"),
    [
        ("llama untied", [0, 0], None),
        ("mistral", [WINDOW, WINDOW], WINDOW),
        ("qwen2", [0, WINDOW], None),
        ("smollm3 sliding", [0, WINDOW], None),
        ("gemma2", [WINDOW, 0, WINDOW], None),
        ("gemma3", [WINDOW, 0, WINDOW, 0], None),
        ("olmo3", [WINDOW, WINDOW, WINDOW, 0], None),
        ("gpt oss", [WINDOW, 0], None),
        ("starcoder2", [WINDOW, WINDOW], WINDOW),
    ],
)
def test_a_window_is_offered_only_if_every_layer_has_one(
    name: str, windows: list[int], freeable: int | None, tmp_path: Path
) -> None:
    config = make_golden_model(name).config
    config.architectures = [GOLDEN[name].model_class or f"{GOLDEN[name].family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    read = load_model_config(tmp_path)
    assert [layer.window for layer in read.layers] == windows
    assert read.window == freeable
