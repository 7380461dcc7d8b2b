"""Checkpoints for the perplexity benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.quantised_models import FORMATS, make_plain_model

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "quantised_checkpoints.py"

pytestmark = pytest.mark.slow


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "plain"
    make_plain_model().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write(out: Path, model_dir: Path, *formats: str) -> list[Path]:
    command = [sys.executable, str(PROGRAM), str(out), *formats, "--model", str(model_dir)]
    written = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(map(Path, written.stdout.split()))


def test_each_format_becomes_a_directory_once(model_dir: Path, tmp_path: Path) -> None:
    awq, nested = write(tmp_path / "out", model_dir, "awq", "bitsandbytes nf4 nested")
    assert (awq.name, nested.name) == ("awq", "bitsandbytes-nf4-nested")
    config = json.loads((awq / "config.json").read_text())
    assert config["quantization_config"] == FORMATS["awq"].config
    assert (awq / "tokenizer.json").read_text() == "{}"
    stamp = (awq / "model.safetensors").stat().st_mtime_ns
    assert write(tmp_path / "out", model_dir, "awq") == [awq]
    assert (awq / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_format_that_is_none_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        write(tmp_path / "out", model_dir, "gguf")
    assert "'gguf' is no format" in failed.value.stderr
