"""Real processes of every role, forked from a server that has all their imports loaded.

A fork takes a hundredth of the time that a start with all imports takes, so that many tests can
afford processes which really die.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from support.wait import wait_until
from tidemill.service.runtime import ORPHANED_STATUS

#: How long a test waits for what must happen: the longest lease, and patience with a slow machine.
LIVENESS_SECONDS = 32.0

_TESTS = Path(__file__).resolve().parents[1]
_PRELOADED = [
    "support.actors",
    "support.batch_runner",
    "support.fake_worker",
    "support.recorder",
    "tidemill_scheduler.__main__",
]

_context = multiprocessing.get_context("forkserver")


@dataclass
class Actor:
    """One process under test; its output goes to ``log_path``."""

    process: ForkServerProcess
    log_path: Path

    @property
    def log(self) -> str:
        """What it has printed and logged."""
        return self.log_path.read_text("utf-8", "replace")

    @property
    def is_running(self) -> bool:
        """Whether it lives."""
        return self.process.is_alive()

    def wait(self) -> int:
        """Wait for its end; returns its exit status, negative for a signal."""
        self.process.join(LIVENESS_SECONDS)
        assert self.process.exitcode is not None, f"it does not end; its log:\n{self.log}"
        return self.process.exitcode

    def kill(self) -> None:
        """End it without any clean-up, whether it is paused or not."""
        self.process.kill()
        self.wait()

    def drain(self) -> None:
        """Ask it to leave."""
        self._signal(signal.SIGTERM)

    def pause(self) -> None:
        """Stop it where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def first_line(self) -> str:
        """Wait for the first whole line of its log: what a worker prints is its id."""
        wait_until(lambda: "\n" in self.log, LIVENESS_SECONDS, "it says nothing")
        return self.log.partition("\n")[0]

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@dataclass
class Troupe:
    """Starts actors and ends them all."""

    directory: Path
    actors: list[Actor] = field(default_factory=list)

    def start(
        self, main: str, *arguments: object, crash_at: str = "", name: str = "actor"
    ) -> Actor:
        """Run ``main``, "<module>:<function>", in a process that dies at ``crash_at``."""
        log_path = self.directory / f"{name}-{len(self.actors)}.log"
        log_path.touch()
        variables = {
            "TIDEMILL_CRASH_AT": crash_at,
            "TIDEMILL_CACHE_DIR": str(self.directory / "cache"),
            "TIDEMILL_DATA_DIR": str(self.directory / "data"),
            "TIDEMILL_LOG_LEVEL": "DEBUG",
        }
        self.actors.append(Actor(fork(main, arguments, variables, log_path), log_path))
        return self.actors[-1]

    def close(self) -> None:
        """Kill whoever is left."""
        for actor in self.actors:
            if actor.is_running:
                actor.kill()
            actor.process.close()
        self.actors.clear()


def fork(
    main: str, arguments: Sequence[object], variables: dict[str, str], log_path: Path
) -> ForkServerProcess:
    """Run ``main``, "<module>:<function>", in a new process whose output ``log_path`` gets."""
    _preload()
    process = _context.Process(target=_run, args=(main, arguments, variables, str(log_path)))
    process.start()
    return process


def _preload() -> None:
    # The fork server takes its path from its environment alone.
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH", ""))))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path
    try:
        _context.set_forkserver_preload(_PRELOADED)
        multiprocessing.forkserver.ensure_running()  # type: ignore[attr-defined]
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(main: str, arguments: Sequence[object], variables: dict[str, str], log_path: str) -> None:
    os.environ.update(variables)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    module, _, function = main.partition(":")
    run: Callable[..., int] = getattr(import_module(module), function)
    sys.exit(run(*arguments))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(ORPHANED_STATUS)
