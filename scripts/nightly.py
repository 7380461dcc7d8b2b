"""Run what is too heavy for every change, one after the other: ``make nightly``.

Each stage is a target of make and has a log of its own.  A stage that fails or takes too long does
not keep the next from running.  Exit status 1 if any did, 130 if it was interrupted.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "nightly"
#: How much of a log's end the table shows.
MAX_LAST_CHARS = 70
_STOP_SECONDS = 20.0
#: Of the table, where nobody looks at it in a terminal.
_WIDTH = 140
#: What a make above says to those below, which are none of its own here.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")


@dataclass(frozen=True, slots=True)
class Stage:
    """A target of make and what it is told in ``ARGS``."""

    name: str
    args: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """What runs it, in the repository's folder."""
        told = (f"ARGS={self.args}",) if self.args else ()
        return ("make", "--no-print-directory", self.name, *told)


STAGES = (
    Stage("slow"),
    Stage("clients"),
    Stage("schemathesis"),
    Stage("s3-check"),
    # A seed, jobs and seconds: a fraction of what `make chaos` does, which `make soak` repeats.
    Stage("chaos", "1 300 10"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage went; ``status`` is None if it was stopped because it took too long."""

    name: str
    status: int | None
    seconds: float
    log: Path

    @property
    def is_good(self) -> bool:
        """Whether it found nothing wrong."""
        return self.status == 0

    @property
    def result(self) -> str:
        """In words."""
        if self.status is None:
            return "took too long"
        return "passed" if self.is_good else f"failed ({self.status})"


def run_stage(
    name: str, command: Sequence[str], logs: Path, limit_seconds: float, *, folder: Path = ROOT
) -> Outcome:
    """Run a command to its end, or stop it and all that it started; its output goes to a log."""
    logs.mkdir(parents=True, exist_ok=True)
    path, began = logs / f"{name}.log", time.monotonic()
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _wait(process, limit_seconds)
        finally:
            _stop(process)
    return Outcome(name, status, time.monotonic() - began, path)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what a stage's own make is to see."""
    return {name: value for name, value in variables.items() if name not in _OF_MAKE}


def last_line(log: Path) -> str:
    """Return the last line of a log that says anything."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:MAX_LAST_CHARS]


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return what came of all stages, a row for each."""
    shown = Table("stage", "result", "minutes", "the log's last line", "log")
    for one in outcomes:
        minutes = f"{one.seconds / 60:.1f}"
        log = os.path.relpath(one.log)
        shown.add_row(one.name, one.result, minutes, last_line(one.log), log)
    return shown


def chosen(names: Sequence[str], stages: Sequence[Stage] = STAGES) -> list[Stage]:
    """Return the stages of these names in their usual order, all without any."""
    return [stage for stage in stages if not names or stage.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [stage.name for stage in STAGES]
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; all")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the logs (%(default)s)")
    parser.add_argument("--hours", type=float, default=3.0, help="for a stage (%(default)g)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.stages) - set(names)):
        parser.error(f"there is no stage {unknown[0]!r}; choose from {', '.join(names)}")
    return _run_all(chosen(options.stages), options.logs, 3600 * options.hours)


def _run_all(stages: Sequence[Stage], logs: Path, limit_seconds: float) -> int:
    width = None if sys.stdout.isatty() else _WIDTH
    console, outcomes = Console(highlight=False, width=width), list[Outcome]()
    # As an interrupt: what a stage has started must not outlive this.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for stage in stages:
            console.print(f"{stage.name} ... {os.path.relpath(logs / stage.name)}.log")
            outcomes.append(run_stage(stage.name, stage.command, logs, limit_seconds))
            console.print(f"{stage.name}: {outcomes[-1].result}")
    except KeyboardInterrupt:
        console.print(table(outcomes))
        console.print("interrupted")
        return 130
    console.print(table(outcomes))
    return 0 if all(one.is_good for one in outcomes) else 1


def _wait(process: subprocess.Popen[bytes], limit_seconds: float) -> int | None:
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and those it has started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
