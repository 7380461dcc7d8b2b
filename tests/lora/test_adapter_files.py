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
    ],
)
def test_what_we_do_not_compute_is_refused_by_its_name(
    directory: Path, setting: str, value: object
) -> None:
    change(directory, **{setting: value})

    with pytest.raises(UnsupportedModel, match=setting):
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
