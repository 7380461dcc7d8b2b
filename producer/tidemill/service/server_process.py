"""The operating-system process of an embedded server, run under its death watcher."""

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import BinaryIO

from tidemill.service import deathwatch

#: How long a server may take to flush and exit after SIGTERM before it is killed.
STOP_GRACE_SECONDS = 10.0
_WATCHER_MARGIN_SECONDS = 5.0

_launcher_pipes: "weakref.WeakSet[BinaryIO]" = weakref.WeakSet()


def _close_inherited_pipes() -> None:
    # A forked child (multiprocessing) that kept the pipe open would keep the server alive.
    for pipe in list(_launcher_pipes):
        os.close(pipe.fileno())


os.register_at_fork(after_in_child=_close_inherited_pipes)


class ServerProcess:
    """A running server; it dies with this process, however this process ends.

    ``inherited_fds`` stay open in the server until it is gone; ``log_file`` receives its output.
    """

    def __init__(
        self, command: list[str], *, log_file: Path, inherited_fds: tuple[int, ...] = ()
    ) -> None:
        with log_file.open("ab") as log:
            self._watcher = subprocess.Popen(
                [*_watcher_command(), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=inherited_fds,
                # A session of its own: Ctrl-C in the terminal drains us first, the server last.
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        _launcher_pipes.add(self._pipe)

    @property
    def _pipe(self) -> BinaryIO:
        pipe = self._watcher.stdin
        assert pipe is not None
        return pipe  # type: ignore[return-value]  # typeshed says IO[bytes]

    def has_exited(self, within_seconds: float = 0.0) -> bool:
        """Whether the server is gone, waiting for that at most ``within_seconds``."""
        try:
            self._watcher.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def exit_status(self) -> int:
        """Of a server that is gone; 128 + n if signal n ended it, -n if its watcher was."""
        return self._watcher.wait()

    def stop(self) -> None:
        """SIGTERM, wait, SIGKILL after a bound; returns when the server is gone."""
        _launcher_pipes.discard(self._pipe)
        self._pipe.close()
        if not self.has_exited(STOP_GRACE_SECONDS + _WATCHER_MARGIN_SECONDS):
            self._watcher.kill()
            self._watcher.wait()


def _watcher_command() -> list[str]:
    script = str(Path(deathwatch.__file__))
    return [sys.executable, "-I", "-S", script, str(STOP_GRACE_SECONDS)]
