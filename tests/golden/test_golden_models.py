"""Every native architecture against transformers, on small random models in float32."""

from pathlib import Path

import pytest

from support.golden_models import (
    GOLDEN,
    WINDOW,
    make_golden_model,
    save_golden_model,
)
from support.golden_runs import check_run, make_prompts
from support.greedy import generate_greedily, reference_logits, reference_outputs
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.model_config import SUPPORTED_ARCHITECTURES, load_model_config
from tidemill_gpuworker.steps.step_config import StepConfig


def make_runner(name: str, model_dir: Path, block_size: int) -> ModelRunner:
    return ModelRunner(
        model_dir,
        dtype="float32",
        block_size=block_size,
        num_blocks=2048 // block_size,
        max_model_len=GOLDEN[name].max_model_len,
        num_threads=2,
    )


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
    worst = check_run(model, prompts, run, GOLDEN[name].atol)
    print(f"{name}: largest difference of logits {worst:.1e}")


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
        check_run(model, prompts, run, GOLDEN[name].atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_blocks"),
    # Where all layers slide, blocks come back early, and it takes less memory to run out of it.
    [
        *(("qwen2", 14), ("gemma2", 14), ("qwen2 moe", 14), ("gpt oss", 14), ("starcoder2", 9)),
        ("llama4", 14),
    ],
)
def test_preempted_sequences_generate_the_same_tokens(
    name: str, num_blocks: int, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    runner = ModelRunner(
        save_golden_model(model, tmp_path), dtype="float32", num_blocks=num_blocks, num_threads=2
    )
    prompts = make_prompts((40, 50, 60, 70, 80), shared=20)
    config = StepConfig(max_model_len=160, max_num_batched_tokens=64, max_num_seqs=8)
    run = generate_greedily(runner, prompts, 24, config)
    assert run.num_preemptions > 0
    check_run(model, prompts, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "granite", "starcoder2", "olmo2"])
def test_bfloat16_logits_are_as_close_to_float64_as_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = make_golden_model(name)
    runner = ModelRunner(
        save_golden_model(model, tmp_path), dtype="bfloat16", num_blocks=128, num_threads=2
    )
    prompts = make_prompts((3, 21, 50, 71, 100), shared=WINDOW + 9)
    config = StepConfig(max_model_len=256, max_num_batched_tokens=40, max_num_seqs=4)
    exact, rounded = make_golden_model(name).double(), make_golden_model(name).bfloat16()

    run = generate_greedily(runner, prompts, 12, config)

    ours = theirs = 0.0
    for prompt, output, logits in zip(prompts, run.outputs, run.logits, strict=True):
        expected = reference_logits(exact, prompt, output)
        ours += float((logits.double() - expected).square().sum())
        theirs += float((reference_logits(rounded, prompt, output) - expected).square().sum())
    print(f"{name}: squared error {ours:.3g}, of transformers {theirs:.3g}")
    assert ours < 1.5 * theirs


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
