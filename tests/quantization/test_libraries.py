"""Our reading of quantised checkpoints against the libraries that define the formats.

The libraries are no part of the project; where one is not installed its tests are skipped.
"""

from pathlib import Path

import pytest
import torch
import transformers

from support.quantised_models import FORMATS, write_quantised
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.quantization.scheme import QuantScheme
from tidemill_gpuworker.quantization.selection import choose_quantization
from tidemill_gpuworker.quantization.stored_layer import StoredLayer

pytestmark = [
    pytest.mark.slow,
    # What the libraries warn of is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

LAYERS = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
# compressed-tensors dequantises in the dtype of its scales, bfloat16 for one.
ROUNDING = 2.0**-8
COMPRESSED = [
    name
    for name in FORMATS
    # Its newest version reads no inputs that are grouped out of order.
    if name.startswith("compressed") and "act order" not in name and "some" not in name
]


def read_layer(model_dir: Path, name: str, shape: torch.Size) -> torch.Tensor:
    scheme = choose_quantization(model_dir, None)
    assert isinstance(scheme, QuantScheme)
    checkpoint = Checkpoint(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    found = scheme.format_of(name)
    assert found is not None
    return found.read(StoredLayer(checkpoint, name, *shape)).packed.in_input_order()


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors 0.20")
    write_quantised(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    for layer in LAYERS:
        expected = model.get_submodule(layer).weight.detach().float()
        found = read_layer(tmp_path, layer, expected.shape)
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0.0)


def test_transformers_reads_the_same_blocks_of_fp8(tmp_path: Path) -> None:
    write_quantised("fp8 blocks", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    # It spreads the blocks of other layers evenly, so that the last is no shorter.
    expected = model.get_submodule(LAYERS[0]).weight
    assert torch.equal(read_layer(tmp_path, LAYERS[0], expected.shape), expected)


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes nf4 nested"])
def test_bitsandbytes_reads_the_same_four_bits(name: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes 0.50")
    plain = write_quantised(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for layer in LAYERS:
        weight = model.get_submodule(layer).weight
        expected = functional.dequantize_4bit(weight.data, weight.quant_state).float()
        found = read_layer(tmp_path, layer, plain.get_submodule(layer).weight.shape)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_bitsandbytes_reads_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes 0.50")
    write_quantised("bitsandbytes int8", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for layer in LAYERS:
        weight = model.get_submodule(layer).weight
        expected = weight.CB.float() * weight.SCB.float()[:, None] / 127
        found = read_layer(tmp_path, layer, expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
