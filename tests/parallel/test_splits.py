"""Which part of a model each rank gets, and which models have no parts."""

import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.golden_models import GOLDEN, make_golden_model, save_golden_model
from tidemill.protocol.errors import ConfigError, DamagedModel, EngineFailed, UnsupportedModel
from tidemill.service.config import load_config
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig, load_model_config
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.parallel.channel import Channel
from tidemill_gpuworker.parallel.setup import make_team
from tidemill_gpuworker.parallel.shard import Section, Shard, place_of
from tidemill_gpuworker.parallel.split_config import check_split, largest_part, split_config
from tidemill_gpuworker.parallel.team import Team


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of("llama untied", tmp_path_factory.mktemp("llama"))


def config_of(name: str, directory: Path) -> ModelConfig:
    model = make_golden_model(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return load_model_config(directory)


def test_ranks_share_heads_inner_features_and_layers(config: ModelConfig) -> None:
    config = replace(config, num_heads=8, num_layers=5, layers=config.layers[:1] * 5)
    parts = [split_config(config, place_of(rank, 4, 2)) for rank in range(8)]
    assert {part.num_heads for part in parts} == {2}
    assert {part.intermediate_size for part in parts} == {24}
    assert [(part.first_layer, part.num_layers) for part in parts] == [(0, 2)] * 4 + [(2, 3)] * 4
    largest = largest_part(partial(split_config, config), place_of(0, 4, 2))
    assert largest.num_layers == 3


def test_ranks_that_outnumber_the_heads_of_keys_hold_the_same_ones(config: ModelConfig) -> None:
    # Queries 0 to 3 belong to the first head of keys, 4 to 7 to the second.
    config = replace(config, num_heads=8)
    parts = [split_config(config, place_of(rank, 4, 1)) for rank in range(4)]
    assert [part.kv_shard for part in parts] == [Shard(0, 2), Shard(0, 2), Shard(1, 2), Shard(1, 2)]
    assert {part.num_kv_heads for part in parts} == {1}


@pytest.mark.parametrize(
    ("changes", "ranks", "named"),
    [
        ({}, (3, 1), "num_attention_heads 4"),
        ({"num_heads": 12, "num_kv_heads": 4}, (6, 1), "num_key_value_heads 4"),
        ({"intermediate_size": 97}, (2, 1), "intermediate_size 97"),
        ({}, (1, 3), "3 pipeline stages"),
    ],
)
def test_a_size_that_cannot_be_divided_is_named(
    config: ModelConfig, changes: dict[str, int], ranks: tuple[int, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_split(replace(config, **changes), *ranks)


def test_experts_that_cannot_be_divided_are_named(tmp_path: Path) -> None:
    config = config_of("qwen2 moe", tmp_path)
    assert config.moe is not None
    with pytest.raises(ConfigError, match="inner size of the experts 41"):
        check_split(replace(config, moe=replace(config.moe, intermediate_size=41)), 2, 1)


def test_norms_over_all_heads_run_in_a_pipeline_only(tmp_path: Path) -> None:
    config = config_of("olmo2", tmp_path)
    check_split(config, 1, 2)
    with pytest.raises(UnsupportedModel, match="all heads together"):
        check_split(config, 2, 1)


def test_what_cannot_be_split_is_refused_before_a_rank_is_started(tmp_path: Path) -> None:
    model_dir = save_golden_model(make_golden_model("llama untied"), tmp_path)
    team = Team(3)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3"):
        ModelRunner(model_dir, num_blocks=8, followers=team)
    assert team.pids == ()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda:1"}, "which 2 ranks cannot share"),
        ({"device": "cuda"}, "2 ranks need a GPU each, torch sees 0"),
        ({"lora": LoraConfig(), "pipeline_parallel_size": 2}, "LoRA adapters"),
    ],
)
def test_settings_that_do_not_go_with_ranks_are_refused(
    options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = WorkerConfig(
        model_dir=Path("unused"),
        served_model_name="tiny",
        redis_url="redis://unused",
        service=load_config(),
        **{"tensor_parallel_size": 2} | options,
    )
    one = replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)
    assert make_team(one, "cpu") is None
    with pytest.raises(ConfigError, match=named):
        make_team(config, config.device)


def open_checkpoint(directory: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory, dtype=torch.float32, device=torch.device("cpu"))


def test_the_parts_of_a_fused_tensor_hold_all_of_it(tmp_path: Path) -> None:
    whole = torch.randn(8 + 4 + 4, 5)
    checkpoint = open_checkpoint(tmp_path, {"qkv": whole})
    queries, keys, values = whole.split([8, 4, 4])
    for rank in range(4):
        # Two ranks each share a head of keys of two rows.
        shard, kv_shard = Shard(rank, 4), Shard(rank // 2, 2)
        sections = [Section(2, shard), Section(2, kv_shard), Section(2, kv_shard)]
        expected = [queries[2 * rank :][:2], *(x[rank // 2 * 2 :][:2] for x in (keys, values))]
        assert torch.equal(checkpoint.part("qkv", 0, sections, 5), torch.cat(expected))


def test_the_parts_of_an_input_are_columns(tmp_path: Path) -> None:
    whole = torch.randn(3, 8)
    checkpoint = open_checkpoint(tmp_path, {"down": whole})
    parts = [checkpoint.part("down", 1, [Section(4, Shard(rank, 2))], 3) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_a_tensor_that_is_not_the_sum_of_its_parts_is_damaged(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"down": torch.zeros(3, 8)})
    with pytest.raises(DamagedModel, match=r"is \[3, 8\], config.json makes it \[3, 6\]"):
        checkpoint.part("down", 1, [Section(3, Shard(0, 2))], 3)


def test_memory_counts_the_parts_that_were_read(tmp_path: Path) -> None:
    names = [f"model.layers.{index}.weight" for index in range(4)]
    checkpoint = open_checkpoint(tmp_path, {name: torch.zeros(4, 6) for name in names})
    checkpoint.skip_layers({2, 3})
    checkpoint.part(names[0], 0, [Section(2, Shard(1, 2))], 6)
    checkpoint.tensor(names[1], 4, 6)
    assert checkpoint.num_bytes == (12 + 24) * 4
    checkpoint.check_layers_taken()


def test_messages_of_any_size_arrive_and_the_end_is_seen() -> None:
    ours, theirs = (Channel(end, "the peer") for end in socket.socketpair())
    ours.send("step", {"ids": b"\0" * 50_000, "n": 3})
    assert theirs.receive() == ("step", {"ids": b"\0" * 50_000, "n": 3})
    ours.close()
    with pytest.raises(EngineFailed, match="the peer is gone"):
        theirs.receive()
    with pytest.raises(EngineFailed, match="takes no orders"):
        theirs.send("step")
    theirs.close()


def test_a_peer_that_does_not_read_is_not_waited_for_without_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(EngineFailed, match="rank 1 takes no orders"):
        Channel(ours, "rank 1", send_seconds=0.05).send("step", {"ids": bytes(1 << 24)})


def test_every_golden_model_can_be_split_or_is_refused_by_name(tmp_path: Path) -> None:
    refused = []
    for number, name in enumerate(GOLDEN):
        try:
            check_split(config_of(name, tmp_path / str(number)), 2, 2)
        except UnsupportedModel:
            refused.append(name)
    assert refused == ["olmo2", "olmo3"]
