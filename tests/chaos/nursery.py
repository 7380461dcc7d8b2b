"""Starts the processes of a run by forking one that has imported everything already.

``python -m chaos.nursery PATCH LIBRARY`` reads one JSON object a line from its standard input,
``{"spec", "environment", "log"}``, and tells what becomes of each child on its standard output:
``{"name", "pid"}`` when it was born, ``{"name", "status"}`` when it has ended.  A start costs
milliseconds instead of half a second of a core, of which a run with a kill a second has few.
"""

import importlib
import json
import os
import selectors
import signal
import sys
from typing import Any

from chaos.process import ProcessSpec, plant, play

_MODULES = (
    "chaos.worker",
    "chaos.scheduler",
    "chaos.producer",
    "chaos.duplicates",
    "tidemill_scheduler.__main__",
)


class Nursery:
    """The parent of all processes; ends them with itself."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._buffer = b""
        # A pipe that SIGCHLD writes to: one wait for commands and for deaths.
        self._wake_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Obey until the standard input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wake_end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake_end:
                        os.read(self._wake_end, 4096)
                    elif not self._read_commands():
                        return
                self._reap()

    def _read_commands(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._bear(json.loads(line))
        return bool(data)

    def _bear(self, command: dict[str, Any]) -> None:
        spec = ProcessSpec(**command["spec"])
        pid = os.fork()
        if pid == 0:
            os._exit(self._live(spec, command))
        self._names[pid] = spec.name
        _tell(name=spec.name, pid=pid)

    def _live(self, spec: ProcessSpec, command: dict[str, Any]) -> int:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(command["environment"])
        try:
            return play(spec)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _tell(name=self._names.pop(pid), status=os.waitstatus_to_exitcode(status))


def _tell(**fields: Any) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    plant(*sys.argv[1:])
    for module in _MODULES:
        importlib.import_module(module)
    Nursery().serve()
