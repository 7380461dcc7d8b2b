"""Whose sampling defaults a worker serves its model with."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tidemill.protocol.errors import ConfigError, DamagedModel
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill.service.config import load_config
from tidemill_gpuworker.loading.generation_config import sampling_defaults
from tidemill_gpuworker.options.command_line import parse_config

#: As published with a model that is known for it, and what else such a file may hold.
QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.0,
    "typical_p": 0.5,
    "min_p": None,
    "max_new_tokens": 2048,
}
TAKEN = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=2048)


def save(directory: Path, values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def found(model_dir: Path, *flags: str) -> SamplingDefaults:
    base = ("--model", str(model_dir), "--redis-url", "redis://h")
    return sampling_defaults(parse_config([*base, *flags], load_config({})))


def test_the_models_own_file_is_taken_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert found(save(tmp_path, QWEN)) == TAKEN
    assert "temperature 0.6, top_k 20" in caplog.text and "--generation-config vllm" in caplog.text


@pytest.mark.parametrize("values", [{}, {"do_sample": False}, {"temperature": 1.0, "top_k": -1}])
def test_a_file_that_says_nothing_changes_nothing(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(tmp_path) == SamplingDefaults()
    assert found(save(tmp_path, values)) == SamplingDefaults()
    assert not caplog.records


def test_nothing_is_taken_from_the_model_with_vllm(tmp_path: Path) -> None:
    model = save(tmp_path, QWEN)
    assert found(model, "--generation-config", "vllm") == SamplingDefaults()
    override = ("--override-generation-config", '{"min_p": 0.2}')
    only = found(model, "--generation-config=vllm", *override)
    assert only == SamplingDefaults(min_p=0.2)


def test_another_directory_takes_the_place_of_the_model(tmp_path: Path) -> None:
    model, other = save(tmp_path / "m", QWEN), save(tmp_path / "o", {"top_k": 7})
    assert found(model, "--generation-config", str(other)) == SamplingDefaults(top_k=7)
    with pytest.raises(ConfigError, match=r"--generation-config: there is no .*nowhere"):
        found(model, "--generation-config", str(tmp_path / "nowhere"))


def test_an_override_goes_before_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    override = '{"temperature": 0.1, "top_k": null, "max_new_tokens": 9, "do_sample": true}'
    want = SamplingDefaults(temperature=0.1, top_p=0.95, max_tokens=9)
    with caplog.at_level(logging.WARNING):
        assert found(save(tmp_path, QWEN), "--override_generation_config", override) == want
    assert "--override-generation-config: do_sample change nothing" in caplog.text


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_an_override_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        found(tmp_path, "--override-generation-config", text)


def test_a_value_out_of_its_limits_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DamagedModel, match=r"generation_config\.json: top_p: .*0") as refused:
        found(save(tmp_path, {"top_p": 0}))
    assert "--generation-config vllm" in refused.value.fix
    with pytest.raises(DamagedModel, match=r"--override-generation-config: temperature"):
        flags = ("--generation-config", "vllm", "--override-generation-config")
        found(tmp_path, *flags, '{"temperature": 9}')


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DamagedModel, match="cannot be read"):
        found(tmp_path)
