"""Plant known bugs in copies of the repository and see whether the tests find them.

``make mutation-check`` (``ARGS="--only fence --jobs 1"``).  Exit status 1 if the tests fail without
any bug, if a bug survives, or if a bug's text is not in the code any more.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutation import Mutation, Outdated
from mutations import MUTATIONS
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("producer", "scheduler", "gpuworker", "kernels")
COPIED = (*SOURCES, "tests", "scripts")
PACKAGES = ("tidemill", "tidemill_scheduler", "tidemill_gpuworker")
#: A test that hangs has found the bug as well.
TIMEOUT_SECONDS = 300
#: All tests of all bugs have longer: a machine with other work to do must not look like a failure.
CONTROL_SECONDS = 1800

_PYTEST = (
    *("-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"),
    *("-p", "mutation_profile", "--hypothesis-profile=mutation", "--hypothesis-seed=1"),
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Broken(Exception):
    """The check itself cannot be made."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said about one bug: those that found it, and those that should have."""

    mutation: Mutation
    seconds: float
    found_by: tuple[str, ...]
    missing: tuple[str, ...]
    problem: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether every test that had to fail has failed."""
        return not self.problem and not self.missing


class Copy:
    """A copy of the repository whose packages its tests import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        self._check_imports()

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """The copy with a bug in it; raises ``Outdated``."""
        before = mutation.apply(self.root)
        try:
            yield
        finally:
            (self.root / mutation.file).write_text(before, "utf-8")

    def run(self, tests: Sequence[str], seconds: float = TIMEOUT_SECONDS) -> set[str]:
        """Run tests; returns those that failed, all of them if they do not end in time."""
        try:
            done = self._python(*_PYTEST, *tests, timeout=seconds)
        except subprocess.TimeoutExpired:
            return set(tests)
        failed = set(_FAILED.findall(done.stdout))
        if done.returncode not in (0, 1) or bool(failed) != bool(done.returncode):
            raise Broken(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return failed

    def _check_imports(self) -> None:
        names = ", ".join(PACKAGES)
        files = f"print(*(m.__file__ for m in ({names})), sep='\\n')"
        told = self._python("-c", f"import {names}; {files}", timeout=60).stdout.split()
        strangers = [file for file in told if not Path(file).is_relative_to(self.root)]
        if strangers or len(told) != len(PACKAGES):
            raise Broken(f"the tests would import {strangers or told} instead of the copy")

    def _python(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        paths = [str(self.root / name) for name in (*SOURCES, "scripts")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            # Files that change twice a second must not be mistaken for their compiled past.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )


def judge(copy: Copy, mutation: Mutation) -> Verdict:
    """Plant one bug and run the tests that must find it."""
    started = time.monotonic()
    try:
        with copy.mutated(mutation):
            failed = copy.run(mutation.tests)
    except (Outdated, Broken) as error:
        return Verdict(mutation, 0.0, (), mutation.tests, str(error))
    missing = tuple(test for test in mutation.tests if not _has(failed, test))
    found = tuple(test for test in mutation.tests if test not in missing)
    return Verdict(mutation, time.monotonic() - started, found, missing)


def _has(failed: Iterable[str], test: str) -> bool:
    """Whether a test has failed, with any parameters if it is named without."""
    return any(each == test or each.startswith(f"{test}[") for each in failed)


def judge_all(copies: Sequence[Copy], mutations: Sequence[Mutation]) -> Iterator[Verdict]:
    """Judge every bug, one on each copy at a time; yields the verdicts in the bugs' order."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge_one(mutation: Mutation) -> Verdict:
        copy = free.get()
        try:
            return judge(copy, mutation)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(judge_one, mutations)


def check_control(copy: Copy, mutations: Sequence[Mutation], console: Console) -> bool:
    """Whether all tests pass while there is no bug."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    started = time.monotonic()
    failed = copy.run(tests, CONTROL_SECONDS)
    seconds = time.monotonic() - started
    if failed:
        console.print(f"[red]fails without any bug:[/] {', '.join(sorted(failed))}")
    else:
        console.print(f"control: {len(tests)} tests pass without any bug ({seconds:.0f} s)")
    return not failed


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print one row per bug."""
    table = Table("bug", "verdict", title="Mutation check")
    table.add_column("found by", overflow="fold")
    table.add_column("seconds", justify="right")
    for verdict in verdicts:
        told = "[green]killed[/]" if verdict.is_killed else "[red]SURVIVED[/]"
        found = [test.rpartition("::")[2] for test in verdict.found_by]
        found += [f"[red]not by {test.rpartition('::')[2]}[/]" for test in verdict.missing]
        if verdict.problem:
            told, found = "[red]NOT PLANTED[/]", [verdict.problem]
        table.add_row(verdict.mutation.name, told, "\n".join(found), f"{verdict.seconds:.1f}")
    console.print(table)
    num_killed = sum(verdict.is_killed for verdict in verdicts)
    console.print(f"{num_killed} of {len(verdicts)} bugs found")


def main() -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Plant bugs and see whether the tests find them.")
    parser.add_argument("--only", default="", help="bugs whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="copies to work on at once")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    with tempfile.TemporaryDirectory(prefix="tidemill-mutations-") as scratch:
        try:
            copies = [Copy(Path(scratch) / str(n)) for n in range(max(1, options.jobs))]
            if not check_control(copies[0], chosen, console):
                return 1
            verdicts = []
            for verdict in judge_all(copies, chosen):
                verdicts.append(verdict)
                console.print(f"{verdict.mutation.name}: {verdict.seconds:.0f} s")
        except Broken as error:
            console.print(f"[red]{error}[/]")
            return 1
    show(verdicts, console)
    return 0 if all(verdict.is_killed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
