"""One supervised process: started by module name, its last words kept."""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

from tidemill.service.runtime import ParentLink

#: What our processes print, as one line, when they refuse to start.
ERROR_PREFIX = "error: "
_KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a process: ``python -m module args`` with ``environment`` added to ours."""

    name: str
    module: str
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running process; ``on_exit(child)`` is called once, on a thread of its own."""

    def __init__(
        self,
        spec: ChildSpec,
        link: ParentLink,
        *,
        sink: Callable[[str], None],
        on_exit: Callable[["Child"], None],
    ) -> None:
        self.spec = spec
        self._sink = sink
        self._on_exit = on_exit
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", spec.module, *spec.args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.environment, **link.environment},
            pass_fds=link.pass_fds,
            # A session of its own: Ctrl-C reaches us alone, and we drain the children in order.
            start_new_session=True,
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        self._pump = threading.Thread(
            target=self._forward, args=(self._process.stdout,), name=f"{spec.name}-output"
        )
        self._pump.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status, negative for a signal, or None while it runs."""
        return self._process.poll()

    @property
    def complaint(self) -> str:
        """The reason it gave for leaving, or what is known of it."""
        for line in reversed(self._last_lines):
            if line.startswith(ERROR_PREFIX):
                return line.removeprefix(ERROR_PREFIX)
        last = self._last_lines[-1] if self._last_lines else "it said nothing"
        return f"{self.spec.name} ended with status {self.exit_status}: {last}"

    def terminate(self) -> None:
        """Ask it to drain; may be repeated."""
        self._process.terminate()

    def kill(self) -> None:
        """End it on the spot."""
        self._process.kill()

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether it is gone, its output forwarded, within the timeout."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        if threading.current_thread() is not self._pump:
            self._pump.join()
        return True

    def _forward(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self._last_lines.append(line.rstrip("\n"))
                # Whoever gives the process up tells its complaint; once is enough.
                if not line.startswith(ERROR_PREFIX):
                    self._sink(line)
        self._process.wait()
        self._on_exit(self)
