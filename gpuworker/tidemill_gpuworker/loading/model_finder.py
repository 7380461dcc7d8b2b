"""From what ``--model`` says to a model directory on this machine.

``python -m tidemill_gpuworker.loading.model_finder MODEL`` prints that directory.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from tidemill.protocol.errors import ModelNotFound, TidemillError
from tidemill.service.config import load_config
from tidemill.service.model_name import GGUF_SUFFIX, parse_hub_name
from tidemill_gpuworker.demo.demo_interrupt import one_interrupt
from tidemill_gpuworker.demo.demo_progress import ProgressReport, SilentReport, TerminalReport
from tidemill_gpuworker.loading.gguf_model import gguf_model_dir
from tidemill_gpuworker.loading.hub_model import hub_model_dir


def find_model_dir(model: str, cache_dir: Path, report: ProgressReport) -> Path:
    """Return the directory of ``model``: itself, converted from GGUF, or downloaded from a hub.

    Raises ``ModelError`` if there is none, ``ConfigError`` if the cache cannot be written.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return gguf_model_dir(path, cache_dir, report)
    if path.is_dir():
        return _in_directory(path, cache_dir, report)
    name = parse_hub_name(model)
    if name is not None:
        return hub_model_dir(name)
    raise ModelNotFound(
        f"model: there is no directory or GGUF file {model!r}",
        fix="Give one, or the name of a model on a hub: organisation/name or"
        " organisation/name@revision.",
    )


def _in_directory(path: Path, cache_dir: Path, report: ProgressReport) -> Path:
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if (path / "config.json").is_file() or not files:
        return path
    if len(files) > 1:
        raise ModelNotFound(
            f"{path} holds several GGUF files: {', '.join(file.name for file in files)}",
            fix="Give the path of one of them.",
        )
    return gguf_model_dir(files[0], cache_dir, report)


def main(arguments: list[str] | None = None) -> int:
    """Command line: print the model directory.

    Errors are one line, status 1; after SIGINT or SIGTERM the status is 130.
    """
    parser = argparse.ArgumentParser(prog="python -m tidemill_gpuworker.loading.model_finder")
    parser.add_argument("model", help="directory, GGUF file or organisation/name[@revision]")
    parser.add_argument("--cache-dir", type=Path, help="default: $TIDEMILL_CACHE_DIR or XDG")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.add_argument(
        "--error-to-stdout", action="store_true", help="for a caller that tells the error itself"
    )
    options = parser.parse_args(arguments)
    if options.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        cache_dir = (options.cache_dir or load_config().cache_dir).absolute()
        report = nullcontext(SilentReport()) if options.quiet else TerminalReport()
        with one_interrupt(), report as shown:
            print(find_model_dir(options.model, cache_dir, shown))
    except TidemillError as error:
        sink = sys.stdout if options.error_to_stdout else sys.stderr
        print(f"error: {error.one_line()}", file=sink)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing half-made is left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
