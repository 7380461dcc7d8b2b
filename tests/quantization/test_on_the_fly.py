"""Plain checkpoints that are quantised while they are loaded."""

import json
import logging
from pathlib import Path

import pytest
import torch

from support.golden_models import make_golden_model
from support.greedy import generate_greedily, reference_logits
from support.quantised_models import make_plain_model
from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.linear_loader import load_linear
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.options.worker_config import QUANTIZATIONS
from tidemill_gpuworker.quantization.config_reader import METHODS
from tidemill_gpuworker.quantization.on_the_fly import ON_THE_FLY, OnTheFly
from tidemill_gpuworker.quantization.selection import choose_quantization
from tidemill_gpuworker.steps.step_config import StepConfig

#: Half a step: of 256 and 16 levels, and of a float with three bits of mantissa.
HALF_STEPS = {"int8": 0.5 / 127, "int4": 0.51 / 15, "fp8": 0.5**4}


def quantise(method: str, weight: torch.Tensor) -> torch.Tensor:
    return OnTheFly(method).quantise(weight).packed.in_input_order()  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ON_THE_FLY)
@pytest.mark.parametrize("columns", [128, 96, 200])
def test_no_weight_moves_by_more_than_half_a_step(method: str, columns: int) -> None:
    weight = torch.randn(32, columns, generator=torch.Generator().manual_seed(1))
    error = (quantise(method, weight) - weight).abs()
    if method == "fp8":
        # Below the least normal value steps are even: 2^-9 of the scale.
        largest = weight.abs().maximum(weight.abs().amax(1, keepdim=True) * 2.0**-6 / 448)
        assert (error <= largest * HALF_STEPS[method] * 1.001).all()
    else:
        spans = weight.abs().amax(1, keepdim=True) * (1 if method == "int8" else 2)
        assert (error <= spans * HALF_STEPS[method] * 1.001).all()
    assert error.max() > 0


@pytest.mark.parametrize("method", ON_THE_FLY)
def test_rows_of_zeros_stay_zero(method: str) -> None:
    weight = torch.randn(16, 64)
    weight[3] = 0
    assert (quantise(method, weight)[3] == 0).all()


@pytest.mark.parametrize("method", ON_THE_FLY)
@pytest.mark.parametrize("num_rows", [3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_multiply_with_the_quantised_weight(
    method: str, dtype: torch.dtype, num_rows: int, tmp_path: Path
) -> None:
    model = make_plain_model()
    model.save_pretrained(tmp_path)
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    checkpoint = Checkpoint(
        tmp_path, dtype=dtype, device=torch.device("cpu"), quantization=OnTheFly(method)
    )
    layer = load_linear(checkpoint, names, [128, 64, 64], 128)
    weight = torch.cat([model.get_submodule(name).weight.detach() for name in names]).to(dtype)
    x = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ quantise(method, weight).double().T
    found = layer(x)
    assert found.dtype == dtype
    eps = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert (found.double() - expected).abs().max() < eps * expected.abs().max()


@pytest.mark.parametrize("method", ON_THE_FLY)
def test_a_model_generates_with_the_quantised_weights(method: str, tmp_path: Path) -> None:
    model = make_plain_model()
    model.save_pretrained(tmp_path)
    runner = ModelRunner(
        tmp_path, dtype="float32", num_blocks=32, num_threads=2, quantization=method
    )
    config = StepConfig(max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4)
    prompt = list(range(20))
    run = generate_greedily(runner, [prompt], 4, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(quantise(method, parameter))
    expected = reference_logits(model, prompt, run.outputs[0])
    assert run.outputs[0] == expected.argmax(-1).tolist()
    assert (run.logits[0] - expected).abs().max() < 1e-3 * expected.abs().max()


def test_the_saving_is_told_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_plain_model()
    model.save_pretrained(tmp_path)
    layers = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    others = sum(p.numel() for name, p in model.named_parameters() if "_proj" not in name)
    with caplog.at_level(logging.INFO, logger="tidemill_gpuworker.engine.model_runner"):
        runner = ModelRunner(tmp_path, dtype="float32", num_blocks=32, quantization="fp8")
    rows = 2 * (128 + 64 + 64 + 128 + 2 * 192 + 128)
    assert runner.memory_use().weights == 4 * others + layers + 4 * rows
    saved = (4 * layers - layers - 4 * rows) / 2**20
    assert f"take {saved:.1f} MiB less than as torch.float32" in caplog.text


def test_routers_of_experts_stay_as_they_are(tmp_path: Path) -> None:
    scheme = OnTheFly("int4")
    assert not scheme.takes("model.layers.0.mlp.gate")
    assert not scheme.takes("model.layers.0.mlp.shared_expert_gate")
    assert scheme.takes("model.layers.0.mlp.gate_proj")
    make_golden_model("mixtral").save_pretrained(tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", num_blocks=32, quantization="int8")
    runner.warm_up()


def test_quantisations_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    for name in ("awq", "int3"):
        with pytest.raises(ConfigError, match=f"{name}.*is not quantised"):
            choose_quantization(tmp_path, name)
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    path.write_text(json.dumps({"quantization_config": section}))
    assert choose_quantization(tmp_path, "gptq") is not None
    with pytest.raises(ConfigError, match="quantised by gptq"):
        choose_quantization(tmp_path, "fp8")


def test_the_command_line_offers_what_there_is() -> None:
    assert set(QUANTIZATIONS) == {*METHODS, *ON_THE_FLY}
