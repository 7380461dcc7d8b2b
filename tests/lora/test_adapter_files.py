"""What is read of an adapter's directory, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.lora_files import write_adapter
from support.tiny_models import make_tiny_model
from tidemill.protocol.errors import (
    DamagedModel,
    ModelError,
    ModelNotFound,
    UnsafeModel,
    UnsupportedModel,
)
from tidemill_gpuworker.lora.adapter_files import read_adapter


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_tiny_model("llama-tied")


@pytest.fixture
def directory(model: transformers.PreTrainedModel, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model, ("q_proj", "down_proj"), rank=4, alpha=8.0)


def change(directory: Path, **values: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_layers_rank_and_scaled_matrices_are_read(directory: Path) -> None:
    files = read_adapter(directory)

    assert files.rank == 4
    assert len(files.modules) == 6
    assert "model.layers.2.mlp.down_proj" in files.modules
    down, up = files.matrices("model.layers.0.self_attn.q_proj")
    assert down.shape == (4, 72)
    assert up.shape == (96, 4)
    change(directory, lora_alpha=4.0)
    torch.testing.assert_close(
        read_adapter(directory).matrices("model.layers.0.self_attn.q_proj")[1], up / 2
    )


def test_the_digest_follows_both_files(
    directory: Path, model: transformers.PreTrainedModel
) -> None:
    first = read_adapter(directory).digest
    assert read_adapter(directory).digest == first

    change(directory, lora_alpha=9.0)
    second = read_adapter(directory).digest
    write_adapter(directory, model, ("q_proj", "down_proj"), rank=4, alpha=8.0, seed=1)

    assert len({first, second, read_adapter(directory).digest}) == 3


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("use_dora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("alpha_pattern", {"q_proj": 3}),
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa"),
        ("alora_invocation_tokens", [7, 8, 9]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("ensure_weight_tying", True),
        ("arrow_config", {"top_k": 3}),
        ("what_a_later_peft_may_add", 0.5),
    ],
)
def test_what_we_do_not_compute_is_refused_by_its_name(
    directory: Path, setting: str, value: object
) -> None:
    change(directory, **{setting: value})

    with pytest.raises(UnsupportedModel, match=setting):
        read_adapter(directory)


#: What PEFT 0.21 saves of a plain adapter beside what ``write_adapter`` does.
_SAVED_BY_PEFT: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "base_model_name_or_path": "some/model",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": {"rho": 2.0},
    "exclude_modules": ["lm_head"],
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": "layers",
    "layers_to_transform": [0, 1, 2],
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_qalora": False,
    "a_setting_of_tomorrow_that_is_off": None,
}


def test_settings_that_change_no_output_are_accepted(directory: Path) -> None:
    change(directory, **_SAVED_BY_PEFT)

    assert read_adapter(directory).rank == 4


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"r": 8}, "rank 8, its matrices have 4"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj rank 2"),
        ({"rank_pattern": {"_proj": 2}}, None),
        ({"r": 8, "rank_pattern": {"self_attn.q_proj": 4, "mlp.down_proj": 4}}, None),
        ({"r": 8, "rank_pattern": {r".*\.(q|down)_proj": 4}}, None),
        ({"r": 8, "rank_pattern": {r".*\.(q|down)_proj": 2}}, "rank 2 or 8"),
        ({"r": True}, "r must be"),
        ({"rank_pattern": [4]}, "rank_pattern must be"),
        ({"use_rslora": "no"}, "use_rslora must be"),
        ({"lora_alpha": 10**400}, "lora_alpha must be"),
    ],
)
def test_settings_that_contradict_the_matrices_are_told(
    directory: Path, settings: dict[str, Any], refused: str | None
) -> None:
    change(directory, **settings)

    if refused is None:
        assert read_adapter(directory).rank == 4
    else:
        with pytest.raises(DamagedModel, match=refused):
            read_adapter(directory)


def test_matrices_that_are_not_finite_are_refused_by_the_layer(directory: Path) -> None:
    change(directory, lora_alpha=1e300)

    with pytest.raises(DamagedModel, match=r"layers\.0\.self_attn\.q_proj .* not finite"):
        read_adapter(directory).matrices("model.layers.0.self_attn.q_proj")


def test_whatever_reading_raises_is_a_model_error_that_names_the_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> bytes:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(Path, "read_bytes", fail)

    with pytest.raises(DamagedModel, match=f"{directory}.*RuntimeError: unexpected"):
        read_adapter(directory)
    assert caplog.records[0].exc_info


def test_a_lack_of_memory_is_not_told_as_damage(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", fail)

    with pytest.raises(MemoryError):
        read_adapter(directory)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("adapter_config.json", b"{", DamagedModel, "not JSON"),
        ("adapter_config.json", b"[]", DamagedModel, "object"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', DamagedModel, "lora_alpha"),
        ("adapter_model.safetensors", b"xxxx", DamagedModel, "too few"),
        ("adapter_config.json", None, ModelNotFound, "adapter_config.json"),
        ("adapter_model.safetensors", None, ModelNotFound, "adapter_model.safetensors"),
    ],
)
def test_damage_is_told_by_file(
    directory: Path, name: str, content: bytes | None, error: type[ModelError], message: str
) -> None:
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)

    with pytest.raises(error, match=message):
        read_adapter(directory)


def test_a_pickle_is_never_read(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")

    with pytest.raises(UnsafeModel, match="pickle"):
        read_adapter(directory)
