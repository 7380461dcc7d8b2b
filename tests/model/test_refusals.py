"""Model directories that must not be served: each is refused with its cause and a fix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from support.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.errors import (
    ConfigError,
    DamagedModel,
    ModelError,
    ModelNotFound,
    UnsafeModel,
    UnsupportedModel,
)
from tidemill.service.config import load_config
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading import safetensors_file
from tidemill_gpuworker.loading.model_choice import choose_model
from tidemill_gpuworker.loading.model_config import SUPPORTED_ARCHITECTURES
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.options.worker_config import WorkerConfig

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_tiny_model("llama-untied", tmp_path / "model")


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    directory = save_tiny_model("llama-untied", tmp_path / "model", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def load(model_dir: Path, **options: Any) -> ModelRunner:
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 8}
    return ModelRunner(model_dir, **settings | options)


def tables_of(runner: ModelRunner) -> list[torch.Tensor]:
    """Return the tensors with a row per position."""
    rotaries = vars(vars(runner)["_model"])["_rotaries"].values()
    values = [value for rotary in rotaries for value in vars(rotary).values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def refusal(model_dir: Path, kind: type[ModelError]) -> str:
    """Return the one line that a user sees."""
    with pytest.raises(kind) as caught:
        load(model_dir)
    assert type(caught.value) is kind
    assert caught.value.fix
    return caught.value.one_line()


def edit_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = safetensors.torch.load_file(model_dir / WEIGHTS)
    change(tensors)
    safetensors.torch.save_file(tensors, model_dir / WEIGHTS)


def rewrite_header(model_dir: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    (model_dir / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal(tmp_path / "none", ModelNotFound)


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path, ModelNotFound)


def test_a_directory_without_weights_is_no_model(model_dir: Path) -> None:
    (model_dir / WEIGHTS).unlink()
    assert WEIGHTS in refusal(model_dir, ModelNotFound)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_damaged(content: bytes, model_dir: Path) -> None:
    (model_dir / "config.json").write_bytes(content)
    assert "config.json" in refusal(model_dir, DamagedModel)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 2**31 - 1),
        ("vocab_size", "512"),
        ("num_attention_heads", True),
        ("num_key_value_heads", 4),
        ("num_key_value_heads", -2),
        ("hidden_size", -72),
        ("hidden_size", 72.0),
        ("intermediate_size", 2**31),
        ("head_dim", 15),
        ("head_dim", [16]),
        ("max_position_embeddings", 10**12),
        ("max_position_embeddings", "512"),
        ("tie_word_embeddings", "no"),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("rope_scaling", "linear"),
        ("quantization_config", "awq"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"}),
    ],
)
def test_a_config_with_an_impossible_value_is_damaged(
    field: str, value: Any, model_dir: Path
) -> None:
    edit_config(model_dir, **{field: value})
    line = refusal(model_dir, DamagedModel)
    assert "config.json" in line
    assert field.removesuffix("_parameters") in line


@pytest.mark.parametrize("setting", ["rope_theta", "factor"])
def test_a_rope_setting_beyond_a_float_is_damaged(setting: str, model_dir: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0} | {setting: 10**400}
    edit_config(model_dir, rope_parameters=rope)
    assert f"rope setting {setting}" in refusal(model_dir, DamagedModel)


def test_heads_that_do_not_divide_the_hidden_size_are_named(model_dir: Path) -> None:
    edit_config(model_dir, head_dim=None, num_attention_heads=7, num_key_value_heads=7)
    line = refusal(model_dir, DamagedModel)
    assert "hidden_size 72" in line
    assert "num_attention_heads 7" in line


@pytest.mark.parametrize("named", ["LlamaForCausalLM", {"first": "LlamaForCausalLM"}, 5])
def test_architectures_that_are_no_list_are_damaged(named: Any, model_dir: Path) -> None:
    edit_config(model_dir, architectures=named)
    assert "architectures" in refusal(model_dir, DamagedModel)


def test_a_config_nested_beyond_reason_is_damaged(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("[" * 10**6)
    assert "config.json" in refusal(model_dir, DamagedModel)


def test_a_config_of_fewer_layers_than_the_weights_have_is_damaged(model_dir: Path) -> None:
    edit_config(model_dir, num_hidden_layers=1)
    line = refusal(model_dir, DamagedModel)
    assert "model.layers.1.input_layernorm.weight" in line
    assert WEIGHTS in line
    assert "config.json" in line


def test_a_bias_that_the_config_does_not_tell_of_is_damage(model_dir: Path) -> None:
    bias = "model.layers.2.self_attn.q_proj.bias"
    edit_weights(model_dir, lambda tensors: tensors.update({bias: torch.zeros(96)}))
    assert bias in refusal(model_dir, DamagedModel)


def test_tensors_that_a_model_can_do_without_are_passed_over(tmp_path: Path) -> None:
    tied = save_tiny_model("llama-tied", tmp_path)
    head = make_tiny_model("llama-tied").get_output_embeddings().weight.detach().clone()
    extra = {
        "lm_head.weight": head,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    edit_weights(tied, lambda tensors: tensors.update(extra))
    load(tied).warm_up()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_damaged(value: float, model_dir: Path) -> None:
    edit_weights(model_dir, lambda tensors: tensors[DOWN].fill_(value))
    with pytest.raises(DamagedModel, match="not finite") as caught:
        load(model_dir).warm_up()
    assert str(model_dir) in caught.value.one_line()
    assert caught.value.fix


def test_an_eos_token_id_outside_the_vocabulary_is_damage(model_dir: Path) -> None:
    byte_level_tokenizer().raw.save(str(model_dir / "tokenizer.json"))
    ids = json.dumps({"eos_token_id": [2, VOCAB_SIZE]})
    (model_dir / "generation_config.json").write_text(ids)
    config = WorkerConfig(
        model_dir=model_dir,
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        device="cpu",
        num_gpu_blocks_override=8,
    )
    with pytest.raises(DamagedModel, match=f"eos_token_id {VOCAB_SIZE}") as caught:
        load_model(config)
    assert caught.value.fix


def test_a_long_context_takes_no_more_tables_than_the_cache_has_room(model_dir: Path) -> None:
    edit_config(model_dir, max_position_embeddings=2**24)
    runner = load(model_dir, num_blocks=2)
    assert runner.max_model_len == 2**24
    # Rows of 16 float32 cosines and sines; 2**24 positions of them are 2 GiB.
    assert sum(table.nbytes for table in tables_of(runner)) == 2 * 32 * 16 * 4


def test_an_unsupported_architecture_is_named_with_those_that_are(model_dir: Path) -> None:
    edit_config(model_dir, architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM is not supported" in refusal(model_dir, UnsupportedModel)
    with pytest.raises(UnsupportedModel) as caught:
        choose_model(model_dir, "native")
    line = caught.value.one_line()
    assert "MambaForCausalLM" in line
    assert all(name in line for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4, "factor": 2.0}}, "axial"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_a_feature_outside_the_family_is_unsupported(
    changes: dict[str, Any], named: str, model_dir: Path
) -> None:
    edit_config(model_dir, **changes)
    assert named in refusal(model_dir, UnsupportedModel)


def test_code_in_the_model_directory_is_never_run(model_dir: Path) -> None:
    edit_config(model_dir, auto_map={"AutoModelForCausalLM": "modeling.MyModel"})
    assert "auto_map" in refusal(model_dir, UnsafeModel)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_weights_are_never_opened(name: str, model_dir: Path) -> None:
    (model_dir / WEIGHTS).unlink()
    (model_dir / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert name in refusal(model_dir, UnsafeModel)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_truncated_weights_are_damaged(share: float, model_dir: Path) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[: int(share * len(data))])
    assert WEIGHTS in refusal(model_dir, DamagedModel)


def test_truncated_weights_name_a_tensor_that_is_cut(model_dir: Path) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[:-1])
    assert "model.norm.weight" in refusal(model_dir, DamagedModel)


def test_bytes_after_the_last_tensor_are_damage(model_dir: Path) -> None:
    with (model_dir / WEIGHTS).open("ab") as file:
        file.write(b"\0")
    assert WEIGHTS in refusal(model_dir, DamagedModel)


def test_an_oversized_header_is_refused_unread(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 1000)
    assert "limit of 1000" in refusal(model_dir, DamagedModel)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a":1}', b'{"a":{"dtype":"F32"}}'])
def test_a_header_that_is_no_tensor_list_is_damaged(header: bytes, model_dir: Path) -> None:
    (model_dir / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    assert "header" in refusal(model_dir, DamagedModel)


@pytest.mark.parametrize(
    "offsets", [[0, 4], [-4, 0], [0, 10**15], [10**15, 10**15], ["0", "4"], [0.0, 4.0], [4]]
)
def test_a_tensor_with_impossible_offsets_is_named(offsets: list[Any], model_dir: Path) -> None:
    rewrite_header(model_dir, lambda header: header[DOWN].update(data_offsets=offsets))
    assert DOWN in refusal(model_dir, DamagedModel)


def test_tensors_that_overlap_are_damaged(model_dir: Path) -> None:
    up, gate = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "gate"))
    rewrite_header(
        model_dir, lambda header: header[up].update(data_offsets=header[gate]["data_offsets"])
    )
    assert WEIGHTS in refusal(model_dir, DamagedModel)


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    edit_weights(model_dir, lambda tensors: tensors.pop(DOWN))
    line = refusal(model_dir, DamagedModel)
    assert DOWN in line
    assert WEIGHTS in line


def test_a_tensor_of_another_shape_is_named(model_dir: Path) -> None:
    edit_weights(model_dir, lambda tensors: tensors.update({DOWN: torch.zeros(72, 95)}))
    line = refusal(model_dir, DamagedModel)
    assert DOWN in line
    assert "[72, 95]" in line
    assert "[72, 96]" in line


def test_a_quantised_tensor_is_unsupported(model_dir: Path) -> None:
    edit_weights(
        model_dir, lambda tensors: tensors.update({DOWN: torch.zeros(72, 96, dtype=torch.int8)})
    )
    line = refusal(model_dir, UnsupportedModel)
    assert DOWN in line
    assert "I8" in line


def test_a_missing_shard_is_named(sharded_dir: Path) -> None:
    shard = sorted(sharded_dir.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(sharded_dir, DamagedModel)


def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(sharded_dir: Path) -> None:
    index = sharded_dir / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][DOWN] = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(content))
    line = refusal(sharded_dir, DamagedModel)
    assert DOWN in line
    assert content["weight_map"][DOWN] in line


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"weight_map":[]}', b'{"weight_map":{}}'])
def test_a_broken_index_is_damaged(content: bytes, sharded_dir: Path) -> None:
    (sharded_dir / "model.safetensors.index.json").write_bytes(content)
    assert "index.json" in refusal(sharded_dir, DamagedModel)


def test_an_index_cannot_point_outside_the_directory(sharded_dir: Path) -> None:
    index = sharded_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {DOWN: "../other/model.safetensors"}}))
    assert "../other" in refusal(sharded_dir, DamagedModel)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "int4"},
        {"max_model_len": 513},
        {"max_model_len": 0},
        {"num_blocks": None, "kv_cache_bytes": 100},
        {"num_blocks": None, "kv_cache_bytes": 10**15},
        {"num_blocks": 10**10},
        {"block_size": 0},
        {"device": "tpu"},
        {"device": "meta"},
        {"device": f"cuda:{torch.cuda.device_count()}"},
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_refused(
    options: dict[str, Any], model_dir: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(model_dir, **options)
    assert caught.value.fix
