"""Adapters of fused, quantised and expert layers."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from support.golden_models import VOCAB_SIZE, make_golden_model, save_golden_model
from support.greedy import generate_greedily, reference_logits
from support.lora_files import merged, write_adapter
from tidemill.protocol.errors import UnsupportedModel
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.lora.adapter_files import read_adapter
from tidemill_gpuworker.lora.layers import AdaptableLayers
from tidemill_gpuworker.steps.step_config import StepConfig

NUM_TOKENS = 8
ATOL = 1e-4


def make_runner(directory: Path, quantization: str | None = None) -> ModelRunner:
    return ModelRunner(
        directory,
        dtype="float32",
        block_size=16,
        num_blocks=64,
        quantization=quantization,
        adaptable=AdaptableLayers(),
    )


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (9, 20, 4)]


CONFIG = StepConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=256)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("mixtral", ("q_proj", "k_proj", "o_proj")),
    ],
)
def test_fused_layers_and_the_attention_of_mixtures_are_adapted(
    name: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    model = make_golden_model(name)
    save_golden_model(model, tmp_path / "model")
    directory = write_adapter(tmp_path / "adapter", model, modules)
    runner = make_runner(tmp_path / "model")
    adapter = runner.load_adapter("x", read_adapter(directory))
    adapters = [adapter, None, adapter]
    prompts = make_prompts()

    run = generate_greedily(runner, prompts, NUM_TOKENS, CONFIG, adapters)

    whole = merged(model, directory, scale=2.0)
    for prompt, each, output, logits in zip(
        prompts, adapters, run.outputs, run.logits, strict=True
    ):
        expected = reference_logits(whole if each else model, prompt, output)
        assert output == expected.argmax(dim=-1).tolist()
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0.0)


def test_single_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = make_golden_model("mixtral")
    save_golden_model(model, tmp_path / "model")
    directory = write_adapter(tmp_path / "adapter", model, ("q_proj",))
    module = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(4, 64),
        f"{module}.lora_B.weight": torch.ones(96, 4),
    }
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors")

    with pytest.raises(UnsupportedModel, match="experts"):
        make_runner(tmp_path / "model").load_adapter("x", read_adapter(directory))


def test_quantised_layers_are_adapted_with_no_loss_of_their_own(tmp_path: Path) -> None:
    # Only what quantising the weights loses by itself may be lost.
    model = make_golden_model("llama untied")
    save_golden_model(model, tmp_path / "model")
    directory = write_adapter(tmp_path / "adapter", model, ("q_proj", "down_proj"))
    prompts = make_prompts()
    whole = merged(model, directory, scale=2.0)
    runner = make_runner(tmp_path / "model", "int8")
    adapter = runner.load_adapter("x", read_adapter(directory))

    adapted = generate_greedily(runner, prompts, 1, CONFIG, [adapter] * 3).logits
    plain = generate_greedily(runner, prompts, 1, CONFIG).logits

    for prompt, with_adapter, without in zip(prompts, adapted, plain, strict=True):
        exact = reference_logits(whole, prompt, [0])
        loss = (reference_logits(model, prompt, [0]) - without).abs().max()
        assert (with_adapter - exact).abs().max() < 3 * loss + ATOL
        assert (with_adapter - without).abs().max() > 3 * loss
