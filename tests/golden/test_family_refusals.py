"""Configs of native families that cannot be served: each is refused with the field at fault."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.golden_models import GOLDEN, make_golden_model
from tidemill.protocol.errors import DamagedModel, ModelError, UnsupportedModel
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.model_config import ModelConfig, load_model_config

LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = GOLDEN["phi3 longrope short"].changes["rope_parameters"]


def write_config(name: str, directory: Path, **changes: Any) -> None:
    config = make_golden_model(name).config
    golden = GOLDEN[name]
    config.architectures = [golden.model_class or f"{golden.family}ForCausalLM"]
    config.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read(name: str, directory: Path, **changes: Any) -> ModelConfig:
    write_config(name, directory, **changes)
    return load_model_config(directory)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "named"),
    [
        ("gemma3", {"layer_types": ["full_attention"]}, DamagedModel, "layer_types"),
        ("gemma3", {"layer_types": "full_attention"}, DamagedModel, "layer_types"),
        ("gemma3", {"layer_types": ["linear_attention"] * 4}, UnsupportedModel, "linear_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, UnsupportedModel, "bidirectional"),
        ("smollm3 sliding", {"use_sliding_window": False}, DamagedModel, "use_sliding_window"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, DamagedModel, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": "many"}, DamagedModel, "query_pre_attn_scalar"),
        ("gemma2", {"hidden_activation": "tanh"}, UnsupportedModel, "hidden_activation"),
        ("mistral", {"sliding_window": 0}, DamagedModel, "sliding_window"),
        ("smollm3", {"no_rope_layers": [1]}, DamagedModel, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, "0"]}, DamagedModel, "no_rope_layers"),
        ("mixtral", {"num_experts_per_tok": 6}, DamagedModel, "num_experts_per_tok"),
        ("qwen2 moe", {"num_experts": 0}, DamagedModel, "num_experts"),
        ("qwen3 moe", {"decoder_sparse_step": 0}, DamagedModel, "decoder_sparse_step"),
        ("gpt oss", {"swiglu_limit": 0}, DamagedModel, "swiglu_limit"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, UnsupportedModel, "'sliding_att"),
        ("llama4", {"attention_chunk_size": 0}, DamagedModel, "attention_chunk_size"),
        ("llama4", {"no_rope_layers": [1]}, DamagedModel, "no_rope_layers"),
        ("llama4", {"moe_layers": [True]}, DamagedModel, "moe_layers"),
        ("llama4", {"floor_scale": 0}, DamagedModel, "floor_scale"),
        ("llama4", {"quantization_config": {"quant_method": "fp8"}}, UnsupportedModel, "Llama4For"),
        ("llama4 with images", {"text_config": None}, DamagedModel, "text_config"),
        (
            "phi3",
            {"rope_parameters": LONGROPE | {"long_factor": [1.0]}},
            DamagedModel,
            "long_factor must be a list of 8",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            DamagedModel,
            "partial_rotary_factor",
        ),
        (
            "granite",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            UnsupportedModel,
            "part of each head",
        ),
        (
            "llama yarn",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": -2}},
            DamagedModel,
            "rope setting factor",
        ),
        (
            "llama yarn",
            {"rope_parameters": YARN | {"rope_theta": 1.0}},
            DamagedModel,
            "rope setting rope_theta",
        ),
        (
            "llama yarn",
            {"rope_parameters": YARN | {"rope_theta": 1e4, "beta_slow": 1e308}},
            DamagedModel,
            "no rotary embedding of the rope settings",
        ),
        (
            "llama yarn",
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0.5}},
            DamagedModel,
            "original_max_position_embeddings must be 1 or more",
        ),
        (
            "llama yarn",
            {"rope_parameters": LINEAR | {"factor": 1e-300}},
            DamagedModel,
            "no rotary embedding of the rope settings",
        ),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1},
            DamagedModel,
            "original_max_position_embeddings must be 2 or more",
        ),
    ],
)
def test_a_config_outside_its_family_is_refused_by_name(
    name: str, changes: dict[str, Any], kind: type[ModelError], named: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        read(name, tmp_path, **changes)
    assert named in caught.value.one_line()
    assert str(tmp_path / "config.json") in caught.value.one_line()
    assert caught.value.fix


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    make_golden_model("mixtral").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 6}))
    with pytest.raises(DamagedModel, match=r"experts\.5|gate\.weight"):
        ModelRunner(tmp_path, dtype="float32", num_blocks=8)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    make_golden_model("qwen3 moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    changes = {"mlp_only_layers": [1]}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DamagedModel, match=r"layers\.1\.mlp"):
        ModelRunner(tmp_path, dtype="float32", num_blocks=8)


def test_long_rotary_factors_must_be_asked_for(tmp_path: Path) -> None:
    config = read("phi3 longrope short", tmp_path)
    assert (config.default_model_len, config.max_model_len) == (256, 512)


def without_layer_types(**changes: Any) -> dict[str, Any]:
    return {"layer_types": None, **changes}


def with_rope_scaling(scaling: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_scaling": scaling, **changes}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", with_rope_scaling(LINEAR, rope_theta=1e6, rope_local_base_freq=1e4)),
        ("gemma3", with_rope_scaling(LINEAR)),
        ("olmo3", with_rope_scaling(YARN, rope_theta=5e5)),
        ("phi3 longrope short", with_rope_scaling(LONGROPE | {"type": "su", "rope_type": None})),
        ("llama yarn", with_rope_scaling(YARN)),
        ("gemma2", without_layer_types()),
        ("gemma3", without_layer_types(sliding_window_pattern=2, _sliding_window_pattern=None)),
        ("olmo3", without_layer_types()),
        ("gpt oss", without_layer_types()),
        ("qwen2", without_layer_types()),
        ("qwen2 moe sliding", without_layer_types()),
        ("smollm3", without_layer_types(no_rope_layers=None)),
        ("gemma", {"hidden_act": "gelu"}),
        ("qwen3 moe", {"num_local_experts": None, "num_experts": 6}),
        ("llama4", without_layer_types(no_rope_layers=[], moe_layers=None)),
    ],
)
def test_older_configs_are_read_alike(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert read(name, tmp_path / "new") == read(name, tmp_path / "old", **changes)


#: A model of each architecture.
BY_FAMILY = {golden.family: name for name, golden in GOLDEN.items() if not golden.vision}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"max_position_embeddings": "left out"}) for name in BY_FAMILY.values()),
        ("gpt oss", {"rope_parameters": "left out"}),
        ("gpt oss", {"rope_parameters": None}),
        ("gpt oss", {"rope_parameters": {}, "max_position_embeddings": 64}),
        ("llama yarn", {"rope_scaling": LINEAR}),
    ],
)
def test_what_a_config_leaves_out_counts_as_in_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    write_config(name, tmp_path, **changes)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "left out"}))
    ours = load_model_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    filled = {field: getattr(theirs, field) for field in changes if field != "rope_scaling"}
    filled["rope_parameters"] = theirs.rope_parameters
    path.write_text(json.dumps(values | filled | {"rope_scaling": None}))
    assert load_model_config(tmp_path) == ours
