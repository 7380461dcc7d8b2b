"""Adapters in a batch, against transformers on models that they are merged into."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from support.greedy import GreedyRun, generate_greedily, reference_logits
from support.lora_files import merged, write_adapter
from support.tiny_models import VOCAB_SIZE, make_tiny_model
from tidemill.protocol.errors import DamagedModel, ModelError, UnsupportedModel
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.lora.adapter_files import read_adapter
from tidemill_gpuworker.lora.layers import AdaptableLayers, LoadedAdapter
from tidemill_gpuworker.steps.step_config import StepConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
NUM_TOKENS = 12
ATOL = 1e-4


@dataclass
class Rig:
    """A model, the runner that serves it, and its adapters with what they are merged into."""

    model: transformers.PreTrainedModel
    runner: ModelRunner
    adapters: dict[str, LoadedAdapter]
    merged: dict[str, transformers.PreTrainedModel]

    def reference(self, name: str | None) -> transformers.PreTrainedModel:
        return self.merged[name] if name else self.model

    def run(
        self, prompts: list[list[int]], names: list[str | None], budget: int = 512
    ) -> GreedyRun:
        config = StepConfig(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=budget)
        adapters = [self.adapters[name] if name else None for name in names]
        return generate_greedily(self.runner, prompts, NUM_TOKENS, config, adapters)

    def check(self, prompts: list[list[int]], names: list[str | None], run: GreedyRun) -> None:
        runs = zip(prompts, names, run.outputs, run.logits, strict=True)
        for prompt, name, output, logits in runs:
            expected = reference_logits(self.reference(name), prompt, output)
            assert output == expected.argmax(dim=-1).tolist()
            torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0.0)


def make_rig(name: str, directory: Path) -> Rig:
    model = make_tiny_model(name)
    model.save_pretrained(directory / "model")
    layers = AdaptableLayers()
    runner = ModelRunner(
        directory / "model", dtype="float32", block_size=16, num_blocks=128, adaptable=layers
    )
    rig = Rig(model, runner, {}, {})
    # All layers; the attention of some layers, and only queries and values; another rank and scale.
    add_adapter(rig, write_adapter(directory / "all", model, ALL, seed=1), scale=2.0)
    part = write_adapter(
        directory / "part",
        model,
        ("q_proj", "v_proj"),
        rank=3,
        alpha=6.0,
        seed=2,
        only=lambda layer: ".1." not in layer,
        use_rslora=True,
    )
    add_adapter(rig, part, scale=6.0 / 3.0**0.5)
    return rig


def add_adapter(rig: Rig, directory: Path, scale: float) -> None:
    rig.adapters[directory.name] = rig.runner.load_adapter(directory.name, read_adapter(directory))
    rig.merged[directory.name] = merged(rig.model, directory, scale)


@pytest.fixture(scope="module", params=["llama-tied", "qwen2"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(request.param, tmp_path_factory.mktemp("lora"))


def make_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def test_adapters_in_one_batch_are_the_models_they_are_merged_into(rig: Rig) -> None:
    prompts = make_prompts([5, 20, 33, 8, 40, 17])
    names = ["all", None, "part", "all", "part", None]

    run = rig.run(prompts, names)

    rig.check(prompts, names, run)
    assert run.largest_batch == 6


def test_prompts_in_chunks_are_adapted_too(rig: Rig) -> None:
    prompts = make_prompts([50, 45, 3])
    names = ["all", "part", None]

    run = rig.run(prompts, names, budget=20)

    rig.check(prompts, names, run)
    assert run.num_chunked > 0


def test_a_prefix_is_found_under_its_own_adapter_only(rig: Rig) -> None:
    [prompt] = make_prompts([40])
    prompts = [prompt] * 6
    names = ["all", None, "part", "all", None, "part"]

    run = rig.run(prompts, names)

    # Each of the three is computed once, and found by the one that comes after it.
    assert run.num_hit_tokens == 3 * 32
    rig.check(prompts, names, run)


def test_adapters_change_what_is_said(rig: Rig) -> None:
    [prompt] = make_prompts([30])

    run = rig.run([prompt] * 3, ["all", "part", None])

    assert len({tuple(output) for output in run.outputs}) == 3


@pytest.mark.parametrize(
    ("module", "in_features", "error", "message"),
    [
        ("model.layers.0.self_attn.o_proj", 5, DamagedModel, r"o_proj are \[2, 5\]"),
        ("lm_head", 72, UnsupportedModel, "lm_head"),
        ("model.layers.9.self_attn.o_proj", 72, UnsupportedModel, "layers.9"),
    ],
)
def test_an_adapter_of_another_model_is_refused_by_layer(
    rig: Rig, tmp_path: Path, module: str, in_features: int, error: type[ModelError], message: str
) -> None:
    directory = write_adapter(tmp_path / "other", rig.model, ("o_proj",), rank=2)
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(2, in_features),
        f"base_model.model.{module}.lora_B.weight": torch.ones(72, 2),
    }
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors")

    with pytest.raises(error, match=message):
        rig.runner.load_adapter("other", read_adapter(directory))
