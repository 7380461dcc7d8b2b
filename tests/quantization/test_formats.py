"""Every quantised format against transformers with the weights that it stands for, in float32."""

from pathlib import Path

import pytest
import torch
import transformers

from support.greedy import generate_greedily, reference_logits
from support.quantised_models import FORMATS, VOCAB_SIZE, write_quantised
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.quantization.selection import choose_quantization
from tidemill_gpuworker.quantization.stored_layer import StoredLayer
from tidemill_gpuworker.steps.step_config import StepConfig

RELATIVE = 1e-3
DOWN = "model.layers.1.mlp.down_proj"


def check_generation(model_dir: Path, model: transformers.PreTrainedModel) -> None:
    """Assert that logits and greedy tokens are those of ``model``."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 23)]
    runner = ModelRunner(model_dir, dtype="float32", num_blocks=32, num_threads=2)
    config = StepConfig(max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4)
    run = generate_greedily(runner, prompts, 4, config)
    for prompt, output, logits in zip(prompts, run.outputs, run.logits, strict=True):
        expected = reference_logits(model, prompt, output)
        assert output == expected.argmax(-1).tolist()
        assert (logits - expected).abs().max() < RELATIVE * expected.abs().max()


@pytest.mark.parametrize("name", FORMATS)
def test_logits_and_tokens_are_those_of_the_weights_it_stands_for(
    name: str, tmp_path: Path
) -> None:
    check_generation(tmp_path, write_quantised(name, tmp_path))


@pytest.mark.parametrize("name", [name for name in FORMATS if "some" not in name])
def test_weights_are_read_exactly(name: str, tmp_path: Path) -> None:
    model = write_quantised(name, tmp_path)
    scheme = choose_quantization(tmp_path, None)
    checkpoint = Checkpoint(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    expected = model.get_submodule(DOWN).weight
    found = scheme.format_of(DOWN).read(StoredLayer(checkpoint, DOWN, *expected.shape))
    weight = found.packed.in_input_order()
    if found.outliers is not None:
        weight += found.outliers.to_dense()
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
