"""The processes of a run as the harness sees them: children of the nursery."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from chaos.process import ProcessSpec

Slot = tuple[str, int]

_TESTS = Path(__file__).resolve().parents[1]
_BIRTH_SECONDS = 30.0


class Child:
    """A process that the nursery has borne."""

    def __init__(self) -> None:
        self.pid = 0
        self.status: int | None = None
        self.born = threading.Event()
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """The exit status, or None while it lives."""
        return self.status

    def wait(self, timeout: float) -> int:
        """The exit status; raises ``subprocess.TimeoutExpired``."""
        if not self.ended.wait(timeout) or self.status is None:
            raise subprocess.TimeoutExpired("child of the nursery", timeout)
        return self.status

    def send_signal(self, number: int) -> None:
        """Signal the process if it lives."""
        if self.status is None:
            os.kill(self.pid, number)


class NurseryClient:
    """The nursery's end in the harness; a thread hears of births and deaths."""

    def __init__(self, patch: str, library: str, pass_fds: Sequence[int]) -> None:
        self._children: dict[str, Child] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.nursery", patch, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            pass_fds=pass_fds,
        )
        self._thread = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._thread.start()

    def bear(self, spec: ProcessSpec, variables: Mapping[str, str], log: Path) -> Child:
        """Start a process."""
        child = self._children[spec.name] = Child()
        command = {"spec": asdict(spec), "environment": dict(variables), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        if not child.born.wait(_BIRTH_SECONDS):
            raise RuntimeError("the nursery bears no children")
        return child

    def close(self) -> None:
        """End the nursery, whose children must have ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._thread.join(10)
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            child = self._children[news["name"]]
            if "pid" in news:
                child.pid = news["pid"]
                child.born.set()
            else:
                child.status = news["status"]
                child.ended.set()


def kill(child: Child) -> None:
    """SIGKILL, which ends a stopped process as well."""
    child.send_signal(signal.SIGKILL)


def environment() -> dict[str, str]:
    """The environment of every process of a run."""
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
