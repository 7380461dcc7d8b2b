"""Which model to serve: a directory given by the user, or the demo model."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from tidemill.cli.child import ERROR_PREFIX
from tidemill.protocol.errors import ConfigError, ModelNotFound

DEMO_MODEL_NAME = "smollm2-135m-instruct"
_DEMO_MODULE = "tidemill_gpuworker.demo_model"


def require_extras(*modules: str) -> None:
    """Raise ``ConfigError`` unless the packages that an extra brings are installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"the package {module!r} is not installed, so this machine cannot run a worker",
                fix='Install it with: pip install "tidemill[all]".',
            )


def find_model(model: str | None, cache_dir: Path, *, quiet: bool = False) -> tuple[Path, str]:
    """Return directory and served name of ``model``, or of the demo model if None.

    Raises ``ModelNotFound`` with the reason.  The demo model is fetched and converted once.
    """
    if model is None:
        return _demo_model(cache_dir, quiet=quiet), DEMO_MODEL_NAME
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelNotFound(
            f"model: {model!r} is not a directory",
            fix="Give a Hugging Face model directory, or leave --model out for the demo model.",
        )
    return path.resolve(), path.resolve().name


def _demo_model(cache_dir: Path, *, quiet: bool) -> Path:
    command = [sys.executable, "-m", _DEMO_MODULE, "--cache-dir", str(cache_dir)]
    done = subprocess.run(
        [*command, *(["--quiet"] if quiet else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().split("\n")
    if done.returncode == 0:
        return Path(lines[-1])
    said = [line for line in (done.stderr or "").split("\n") if line.startswith(ERROR_PREFIX)]
    raise ModelNotFound(
        said[-1].removeprefix(ERROR_PREFIX) if said else "no demo model (see above)"
    )
