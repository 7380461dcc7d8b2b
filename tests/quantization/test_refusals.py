"""What is not read of quantised checkpoints is refused by name, and damage is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from support.quantised_models import FORMATS, write_quantised
from tidemill.protocol.errors import DamagedModel, ModelError, UnsupportedModel
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.quantization.config_reader import read_scheme
from tidemill_gpuworker.quantization.formats.awq import AwqFormat
from tidemill_gpuworker.quantization.scheme import QuantScheme

PATH = Path("config.json")
DOWN = "model.layers.1.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8"}
SQUEEZE = {"quant_method": "squeezellm", "wbits": 4}
COMPRESSED = FORMATS["compressed w4a16"].config


def read(section: Any) -> QuantScheme:
    scheme = read_scheme({"quantization_config": section}, PATH)
    assert scheme is not None
    return scheme


def with_weights(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    changed = {**group, "weights": group["weights"] | changes}
    return COMPRESSED | {"config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"bits": 4}, "unknown"),
        (GPTQ | {"bits": 3}, "bits 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"lm_head": True}, "lm_head"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (FP8 | {"activation_scheme": "block"}, "activation_scheme"),
        (SQUEEZE | {"wbits": 3}, "wbits 3"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}, "int4"),
        (COMPRESSED | {"format": "marlin-24"}, "marlin-24"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (with_weights(num_bits=3), "num_bits"),
        (with_weights(strategy="tensor"), "tensor"),
    ],
)
def test_what_is_not_read_is_named(section: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(section)
    assert named in caught.value.one_line()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("gptq", "quantization_config"),
        (GPTQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "pattern"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (COMPRESSED | {"config_groups": {"group_0": 4}}, "group_0"),
        (COMPRESSED | {"ignore": ["re:("]}, "pattern"),
        (with_weights(group_size=None), "group_size"),
    ],
)
def test_a_value_of_the_wrong_kind_is_damage(section: Any, named: str) -> None:
    with pytest.raises(DamagedModel) as caught:
        read(section)
    assert named in caught.value.one_line()


def test_a_model_without_the_section_is_not_quantised() -> None:
    assert read_scheme({}, PATH) is None
    assert read_scheme({"quantization_config": None}, PATH) is None


def test_lists_of_plain_layers_mean_whole_names() -> None:
    scheme = read(AWQ | {"modules_to_not_convert": ["lm_head", "model.layers.1", "gate"]})
    plain = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.gate"]
    assert [scheme.format_of(name) for name in plain] == [None, None, None]
    for name in ("model.layers.10.mlp.up_proj", "model.layers.2.mlp.gate_proj"):
        assert scheme.format_of(name) == AwqFormat(128)


def test_the_group_that_names_a_layer_counts_before_the_one_for_all() -> None:
    group = COMPRESSED["config_groups"]["group_0"]
    named = {"targets": ["re:.*down_proj"], "weights": group["weights"] | {"num_bits": 8}}
    scheme = read(COMPRESSED | {"config_groups": {"all": group, "one": named}})
    assert scheme.format_of(DOWN).bits == 8  # type: ignore[union-attr]
    assert scheme.format_of("model.layers.1.mlp.up_proj").bits == 4  # type: ignore[union-attr]


def test_layers_that_gptq_leaves_out_by_pattern_are_plain() -> None:
    scheme = read(GPTQ | {"dynamic": {"-:.*down_proj": {}}})
    assert scheme.format_of(DOWN) is None
    assert scheme.format_of("model.layers.1.mlp.up_proj") is not None


def refusal(model_dir: Path, kind: type[ModelError]) -> str:
    with pytest.raises(kind) as caught:
        ModelRunner(model_dir, dtype="float32", num_blocks=8)
    return caught.value.one_line()


def edit(model_dir: Path, change: Any) -> None:
    path = model_dir / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "suffix", "value", "told"),
    [
        ("gptq v1", "scales", None, "scales is missing"),
        ("gptq v1", "qweight", torch.zeros(3, 3, dtype=torch.int32), "qweight"),
        ("gptq v1", "g_idx", torch.zeros(192, dtype=torch.int32), "groups of 64"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(1, 1), "weight_scale_inv"),
        ("fp8 one scale", "weight_scale", torch.ones(3), "3 scales for 128 outputs"),
        ("compressed int8", "weight", torch.zeros(128, 192).byte(), "not int8"),
        ("squeezellm sparse", "cols", torch.zeros(1, dtype=torch.int32), "no sparse matrix"),
        ("bitsandbytes nf4", "weight.absmax", torch.ones(2), "weight.absmax"),
    ],
)
def test_tensors_that_contradict_each_other_are_told(
    name: str, suffix: str, value: torch.Tensor | None, told: str, tmp_path: Path
) -> None:
    write_quantised(name, tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.{suffix}"))
    if value is not None:
        edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.{suffix}": value}))
    line = refusal(tmp_path, DamagedModel)
    assert DOWN in line
    assert told in line


def test_whole_rows_of_squeezellm_are_refused(tmp_path: Path) -> None:
    write_quantised("squeezellm", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.full_rows": torch.ones(192, 2)}))
    assert "full_rows" in refusal(tmp_path, UnsupportedModel)


def test_biases_of_zeros_are_dropped_and_others_are_told(tmp_path: Path) -> None:
    write_quantised("gptq v1", tmp_path)
    bias = torch.zeros(128)
    edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.bias": bias}))
    ModelRunner(tmp_path, dtype="float32", num_blocks=8).warm_up()
    edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.bias": bias + 1}))
    assert f"{DOWN}.bias" in refusal(tmp_path, DamagedModel)


def test_scales_of_a_kv_cache_in_fp8_are_left_alone(tmp_path: Path) -> None:
    write_quantised("compressed fp8 dynamic", tmp_path)
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}
    edit(tmp_path, lambda tensors: tensors.update(scales))
    ModelRunner(tmp_path, dtype="float32", num_blocks=8).warm_up()


def test_a_quantised_tensor_that_nothing_reads_is_told(tmp_path: Path) -> None:
    write_quantised("awq", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert "is missing" in refusal(tmp_path, DamagedModel)
