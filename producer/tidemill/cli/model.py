"""Which model to serve: what the user names, or the demo model."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from tidemill.cli.child import ERROR_PREFIX
from tidemill.protocol.errors import ConfigError, ModelNotFound
from tidemill.service.model_name import default_served_name

DEMO_MODEL_NAME = "smollm2-135m-instruct"
_DEMO_MODULE = "tidemill_gpuworker.demo.demo_model"
_FINDER_MODULE = "tidemill_gpuworker.loading.model_finder"


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

    ``model`` is a directory, a GGUF file, or a name on a hub; the last two, and the demo model, are
    converted or fetched once.  Raises ``ModelNotFound`` with the reason.
    """
    if model is None:
        return _prepared(_DEMO_MODULE, [], cache_dir, quiet=quiet), DEMO_MODEL_NAME
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve(), path.resolve().name
    found = _prepared(_FINDER_MODULE, [model], cache_dir, quiet=quiet)
    return found.resolve(), default_served_name(model)


def _prepared(module: str, arguments: list[str], cache_dir: Path, *, quiet: bool) -> Path:
    # Its standard error is ours, for the progress; an error comes with the output, to be told once.
    command = [sys.executable, "-m", module, "--cache-dir", str(cache_dir)]
    command += ["--error-to-stdout", *(["--quiet"] if quiet else [])]
    command += ["--", *arguments] if arguments else []
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
        last = f"the preparation of the model ended with status {process.returncode}"
    raise ModelNotFound(last.removeprefix(ERROR_PREFIX))
