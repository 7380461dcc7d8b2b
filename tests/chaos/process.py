"""Any process under chaos: ``python -m chaos.process SPEC``, or a child of the nursery.

``SPEC`` is a ``ProcessSpec`` as JSON.  A planted bug or another function library takes effect
before anything of ours is imported that could have copied what it replaces.
"""

import importlib
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.history import Recorder


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process needs to take part in a run; ``name`` is unique to this start of it."""

    name: str
    role: str
    index: int
    url: str
    directory: str
    seed: int
    num_jobs: int
    seconds: float
    started: float
    duplicate_share: float = 0.0
    skew_seconds: float = 0.0
    is_old: bool = False
    patch: str = ""
    library: str = ""

    @property
    def recorder(self) -> Recorder:
        """Where this start of the process records what it does."""
        return Recorder(Path(self.directory) / f"{self.name}.jsonl")


def plant(patch: str, library: str) -> None:
    """Import the module that plants a bug, and replace the function library."""
    if library:
        from tidemill.protocol import functions

        functions.LUA_SOURCE = Path(library).read_text().replace("tmN", functions.LIBRARY)
    if patch:
        importlib.import_module(patch)


def play(spec: ProcessSpec) -> int:
    """Play a process's part to its end; returns the exit status."""
    from tidemill.service.runtime import exit_with_parent

    exit_with_parent()
    _skew_clocks(spec.skew_seconds)
    if spec.is_old:
        _use_previous_version()
    if spec.duplicate_share:
        from chaos import duplicates

        duplicates.install(spec.duplicate_share, random.Random(spec.name))
    return int(importlib.import_module(f"chaos.{spec.role}").main(spec))


def _skew_clocks(seconds: float) -> None:
    # Wall clocks only: steady ones do not differ between machines.  In Python, because libfaketime
    # breaks waits that end at an absolute time.
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + round(seconds * 1e9)


def _use_previous_version() -> None:
    from tidemill.protocol.library import VERSION, library_name, library_source

    names = {"LIBRARY": library_name, "LUA_SOURCE": library_source}
    for name, render in names.items():
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("tidemill") and getattr(module, name, "") == render():
                setattr(module, name, render(VERSION - 1))


def main() -> int:
    """Run one process of its own."""
    spec = ProcessSpec(**json.loads(sys.argv[1]))
    plant(spec.patch, spec.library)
    return play(spec)


if __name__ == "__main__":
    sys.exit(main())
