"""``tidemill worker`` and ``tidemill scheduler``: one process of a deployment."""

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

import typer

from tidemill.protocol.errors import ConfigError

#: The process has a parser of its own, which also answers --help: everything is passed on.
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def worker(context: typer.Context) -> None:
    """Serve one model: `tidemill worker --model DIR`, options as vLLM's; see its --help."""
    _become("tidemill_gpuworker", "worker", context.args)


def scheduler(context: typer.Context) -> None:
    """Run the scheduler of one shard, or its standby; see its --help."""
    _become("tidemill_scheduler", "scheduler", context.args)


def _become(module: str, extra: str, arguments: list[str]) -> NoReturn:
    # The command line imports no other process; this one turns into it, signals and all.
    if find_spec(module) is None:
        raise ConfigError(
            f"the package {module} is not installed",
            fix=f'Install it with: pip install "tidemill[{extra}]".',
        )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
