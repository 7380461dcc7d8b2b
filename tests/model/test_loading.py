"""What a model directory is read as: sizes, weights in any layout, memory, revision."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from support.tiny_models import make_tiny_model, save_tiny_model
from tidemill_gpuworker.engine.model_runner import ModelRunner, choose_dtype
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import load_model_config
from tidemill_gpuworker.memory.kv_cache import num_blocks_in
from tidemill_gpuworker.models.rope import RopeConfig

CPU = torch.device("cpu")


def write_config(directory: Path, config: transformers.PreTrainedConfig, **changes: Any) -> Path:
    values = config.to_dict() | {"architectures": [f"{config.model_type.title()}ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(values | changes))
    return directory


def open_checkpoint(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(directory, dtype=dtype, device=CPU)


def assert_same_weights(directory: Path, name: str) -> None:
    checkpoint = open_checkpoint(directory)
    for key, expected in make_tiny_model(name).state_dict().items():
        assert torch.equal(checkpoint.tensor(key, *expected.shape), expected)


def test_the_weights_of_one_file_are_read(tmp_path: Path) -> None:
    assert_same_weights(save_tiny_model("qwen2", tmp_path), "qwen2")


def test_the_weights_of_many_shards_are_read(tmp_path: Path) -> None:
    save_tiny_model("qwen2", tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    assert_same_weights(tmp_path, "qwen2")


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = b'{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}  '
    values = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.bfloat16)
    raw = values.view(torch.uint8).numpy().tobytes()
    content = len(header).to_bytes(8, "little") + header + raw
    assert (8 + len(header)) % 2 == 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert torch.equal(open_checkpoint(tmp_path, torch.bfloat16).tensor("a", 2, 2), values)


def test_weights_survive_the_loss_of_their_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny_model("llama-tied", tmp_path))
    weight = checkpoint.tensor("model.norm.weight", 72)
    expected = weight.clone()
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000_000))
    assert torch.equal(weight, expected)


def test_stacked_weights_stand_on_top_of_each_other(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny_model("llama-tied", tmp_path))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    state = make_tiny_model("llama-tied").state_dict()
    stacked = checkpoint.stacked(names, [96, 32, 32], 72)
    assert torch.equal(stacked, torch.cat([state[name] for name in names]))


def test_the_revision_tells_weights_apart(tmp_path: Path) -> None:
    first = save_tiny_model("llama-tied", tmp_path / "first")
    same = save_tiny_model("llama-tied", tmp_path / "same")
    tuned = save_tiny_model("llama-tied", tmp_path / "tuned")
    weights = safetensors.torch.load_file(tuned / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] += 1e-3
    safetensors.torch.save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    revision = open_checkpoint(first).revision()
    assert len(revision) == 64
    assert open_checkpoint(same).revision() == revision
    assert open_checkpoint(tuned).revision() != revision


def test_the_revision_tells_configs_apart(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny_model("llama-tied", tmp_path))
    before = checkpoint.revision()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert checkpoint.revision() != before


def test_a_sliding_window_does_not_limit_the_context(tmp_path: Path) -> None:
    config = transformers.MistralConfig(sliding_window=128, max_position_embeddings=1024)
    read = load_model_config(write_config(tmp_path, config))
    assert (read.max_model_len, read.default_model_len, read.window) == (1024, 1024, 128)


def test_a_window_that_is_left_out_is_the_one_transformers_takes(tmp_path: Path) -> None:
    write_config(tmp_path, transformers.MistralConfig())
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path).window == transformers.MistralConfig().sliding_window


def test_a_switched_off_window_limits_nothing(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(max_position_embeddings=8192)
    write_config(tmp_path, config, sliding_window=4096, use_sliding_window=False)
    assert load_model_config(tmp_path).window is None


def test_the_older_layout_of_a_config_is_read_alike(tmp_path: Path) -> None:
    new = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = transformers.LlamaConfig(rope_parameters=new)
    read = load_model_config(write_config(tmp_path, config)).layers[0].rope
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    write_config(tmp_path, config, rope_parameters=None, **old)
    assert read == RopeConfig(kind="linear", theta=5e5, factor=2.0)
    assert load_model_config(tmp_path).layers[0].rope == read


def test_a_cache_block_holds_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    runner = ModelRunner(
        save_tiny_model("llama-tied", tmp_path),
        dtype="float32",
        block_size=8,
        kv_cache_bytes=1_000_000,
    )
    bytes_per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, float32
    assert runner.num_blocks == 1_000_000 // (8 * bytes_per_token)
    assert runner.memory_use().kv_cache == runner.num_blocks * 8 * bytes_per_token


def test_half_the_bytes_of_an_element_are_twice_the_blocks(tmp_path: Path) -> None:
    config = load_model_config(save_tiny_model("llama-tied", tmp_path))
    single, half = (
        num_blocks_in(2**20, config, 16, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert half == pytest.approx(2 * single, abs=1)


def test_auto_takes_the_published_dtype_where_the_device_has_it(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(dtype="float16")
    published = load_model_config(write_config(tmp_path, config))
    assert choose_dtype("auto", published, CPU) == torch.float32
    assert choose_dtype("auto", published, torch.device("cuda")) == torch.float16


def test_warming_up_takes_a_small_cache_and_leaves_it_usable(tmp_path: Path) -> None:
    runner = ModelRunner(save_tiny_model("llama-tied", tmp_path), block_size=4, num_blocks=1)
    runner.warm_up()
    assert runner.num_blocks == 1


_LOAD = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tidemill_gpuworker.engine.model_runner import ModelRunner
runner = ModelRunner(Path(sys.argv[1]), dtype=sys.argv[2], num_blocks=2000, num_threads=2)
runner.warm_up()
print(json.dumps(asdict(runner.memory_use()) | {"modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def loaded(demo_model_dir: Path, request: pytest.FixtureRequest) -> Any:
    """What a process that loaded the real model says of itself."""
    command = [sys.executable, "-c", _LOAD, str(demo_model_dir), request.param]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.model
def test_loading_takes_little_more_memory_than_the_weights(loaded: Any) -> None:
    # The cache is not full, so it must fit without its share of the bound.
    assert loaded["peak_resident"] <= 1.2 * loaded["weights"] + 500e6


@pytest.mark.model
def test_loading_imports_no_transformers(loaded: Any) -> None:
    assert "transformers" not in loaded["modules"]
