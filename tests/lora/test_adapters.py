"""Adapters come and go while a worker runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from support.lora_files import write_adapter
from support.tiny_models import make_tiny_model
from tidemill.protocol.errors import (
    ConfigError,
    DamagedModel,
    ModelNotFound,
    UnknownAdapter,
    UnsupportedModel,
)
from tidemill_gpuworker.lora.adapter_files import AdapterFiles
from tidemill_gpuworker.lora.adapters import Adapters
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.lora.layers import LoadedAdapter


class Loads:
    """Notes what was loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, files: AdapterFiles) -> LoadedAdapter:
        self.names.append(name)
        return LoadedAdapter(name, files.digest, {}, 0)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_tiny_model("llama-tied")


@pytest.fixture
def write(model: transformers.PreTrainedModel, tmp_path: Path) -> Callable[..., Path]:
    def write_one(name: str, *, seed: int = 0, rank: int = 2) -> Path:
        return write_adapter(tmp_path / name, model, ("q_proj",), seed=seed, rank=rank)

    return write_one


def names_of(adapters: Adapters) -> list[str]:
    return [card.name for card in adapters.cards]


def test_what_is_put_into_the_directory_is_found_and_what_is_taken_out_is_unknown(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    write("first")
    adapters = Adapters(LoraConfig(directory=tmp_path), Loads())
    assert names_of(adapters) == ["first"]
    assert not adapters.rescan()

    write("second")
    assert adapters.rescan()
    assert names_of(adapters) == ["first", "second"]
    assert adapters.get("second").name == "second"

    shutil.rmtree(tmp_path / "first")
    assert adapters.rescan()
    with pytest.raises(UnknownAdapter, match="'first'"):
        adapters.get("first")


@pytest.mark.parametrize("file", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_what_was_taken_out_a_moment_ago_is_unknown_too(
    tmp_path: Path, write: Callable[..., Path], file: str
) -> None:
    write("stays")
    leaves = write("leaves") / file
    adapters = Adapters(LoraConfig(directory=tmp_path), Loads())

    leaves.rename(tmp_path.with_name(f"{tmp_path.name}-gone"))

    with pytest.raises(UnknownAdapter, match="no adapter 'leaves'") as refusal:
        adapters.get("leaves")
    assert refusal.value.fix == "Known adapters: stays."
    assert adapters.rescan()
    assert names_of(adapters) == ["stays"]


def test_an_adapter_that_was_damaged_a_moment_ago_says_so(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    directory = write("one")
    adapters = Adapters(LoraConfig(directory=tmp_path), Loads())
    (directory / "adapter_config.json").write_text("no JSON")
    with pytest.raises(DamagedModel, match="is not JSON"):
        adapters.get("one")


def test_a_changed_adapter_has_another_digest(tmp_path: Path, write: Callable[..., Path]) -> None:
    write("one")
    adapters = Adapters(LoraConfig(directory=tmp_path), Loads())
    before = adapters.get("one").digest

    write("one", seed=1)
    assert adapters.rescan()

    assert adapters.get("one").digest != before
    assert adapters.cards[0].digest == adapters.get("one").digest


def test_an_adapter_is_loaded_at_the_first_job_and_the_last_used_stay(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    for name in ("a", "b", "c"):
        write(name)
    loads = Loads()
    adapters = Adapters(LoraConfig(directory=tmp_path, max_loras=2), loads)
    loads.names.clear()

    for name in ("a", "b", "a", "c", "a", "b"):
        adapters.get(name)

    assert loads.names == ["a", "b", "c", "b"]


def test_a_half_copied_or_unfit_directory_is_passed_over(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    write("good")
    write("high", rank=32)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("none of these")

    adapters = Adapters(LoraConfig(directory=tmp_path, max_rank=16), Loads())

    assert names_of(adapters) == ["good"]


def test_a_named_adapter_that_cannot_be_served_stops_the_worker(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    high = write("high", rank=32)

    with pytest.raises(UnsupportedModel, match="max_lora_rank 16"):
        Adapters(LoraConfig(modules=(("high", high),)), Loads())
    with pytest.raises(ModelNotFound):
        Adapters(LoraConfig(modules=(("none", tmp_path / "none"),)), Loads())


def test_two_adapters_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'x' is given twice"):
        LoraConfig(modules=(("x", tmp_path), ("x", tmp_path)))
    with pytest.raises(ConfigError, match="no directory"):
        LoraConfig(directory=tmp_path / "missing")


@pytest.mark.parametrize("damage", ["a number larger than a float", "a check that breaks"])
def test_one_bad_directory_is_passed_over_with_a_warning_whatever_it_raises(
    tmp_path: Path, write: Callable[..., Path], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    config = write("bad") / "adapter_config.json"
    if damage.startswith("a number"):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 10**400}))

    def check(name: str, files: AdapterFiles) -> None:
        if name == "bad":
            raise ZeroDivisionError("unexpected")

    adapters = Adapters(LoraConfig(directory=tmp_path), Loads(), check)
    write("good")
    assert adapters.rescan()

    assert names_of(adapters) == ["good"]
    warnings = [r for r in caplog.records if str(config.parent) in r.getMessage()]
    assert len(warnings) == 1, "it is told once, until it changes"
