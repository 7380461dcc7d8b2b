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
    # Its standard error is ours, for the progress; an error comes with the output, to be told once.
    command = [sys.executable, "-m", _DEMO_MODULE, "--cache-dir", str(cache_dir)]
    command += ["--error-to-stdout", *(["--quiet"] if quiet else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            last = process.communicate()[0].strip().rpartition("\n")[2]
        except BaseException:
            # It leaves nothing half-made if it is asked to go and given the time.
            process.terminate()
            process.wait()
            raise
    if process.returncode == 0:
        return Path(last)
    if not last.startswith(ERROR_PREFIX):
        last = f"the preparation of the demo model ended with status {process.returncode}"
    raise ModelNotFound(last.removeprefix(ERROR_PREFIX))
