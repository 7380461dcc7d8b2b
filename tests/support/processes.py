"""Running our commands, and finding what they left behind."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.wait import wait_until

_MARK = "TIDEMILL_TEST_MARK"
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (INFO|WARNING) ")


def heed_interrupts() -> None:
    """For ``preexec_fn``: a parallel test process ignores Ctrl-C, its children must not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that tells what is wrong; the rest may only be log lines."""
        lines = self.stderr.splitlines()
        told = [line for line in lines if not _LOG_LINE.match(line)]
        assert len(told) == 1 and told[0].startswith("error: "), f"not one line in: {self.stderr}"
        return told[0]


@dataclass(frozen=True)
class Sandbox:
    """A private home for commands: own data directory, shared model cache, marked processes."""

    directory: Path
    mark: str
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What the commands see."""
        env = {k: v for k, v in os.environ.items() if k != "TIDEMILL_REDIS_URL"}
        data_dir = str(self.directory / "data")
        return {**env, "TIDEMILL_DATA_DIR": data_dir, _MARK: self.mark, **self.extra}

    def run(self, *args: str, timeout_seconds: float = 120, stdin: str = "") -> Outcome:
        """Run ``tidemill ARGS`` to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "tidemill.cli.main", *args],
            env=self.environment,
            cwd=self.directory,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def left_behind(self) -> list[str]:
        """Command lines of processes that still carry this sandbox's mark."""
        return [command for _, command in marked_processes(self.mark)]


@contextmanager
def sandbox(directory: Path, **extra: str) -> Iterator[Sandbox]:
    """A sandbox; at its end no process of it may be left."""
    box = Sandbox(directory, uuid.uuid4().hex, extra)
    yield box
    wait_until(lambda: not box.left_behind(), 20)


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Return (pid, command line) of living processes whose environment carries ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
        except OSError:  # it ended while we looked, or is not ours
            continue
        if f"{_MARK}={mark}".encode() in environment and command:
            found.append((int(entry.name), command))
    return found
