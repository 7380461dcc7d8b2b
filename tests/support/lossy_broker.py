"""A server that can lose what it has acknowledged, as one that syncs once a second may."""

import os
import shutil
import signal
from pathlib import Path

from support.valkey import require_server_binary
from support.wait import wait_until
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect


class LossyBroker:
    """Writes every command to its log before it answers, so that a test can cut off what it wants.

    A context manager that stops the server.
    """

    def __init__(self, directory: Path) -> None:
        binary = require_server_binary()
        self._broker = EmbeddedBroker.start(directory, fsync="always", binary=binary)
        self._log_dir = directory / "appendonlydir"
        with connect(self.url) as client:
            ensure_library(client)

    @property
    def url(self) -> str:
        """Its address, the same after a restart."""
        return self._broker.url

    def mark(self) -> int:
        """Return a place in its log: what is written from now on comes after it."""
        return self._log().stat().st_size

    def kill(self) -> None:
        """End it without warning."""
        os.kill(self._broker.pid, signal.SIGKILL)
        wait_until(lambda: not self._broker.is_running, what="the end of the server")

    def restart(self) -> None:
        """Start it on what its log holds."""
        self._broker.restart()

    def lose_after(self, mark: int) -> None:
        """Kill it, cut off what its log holds after ``mark``, and start it again."""
        self.kill()
        os.truncate(self._log(), mark)
        self.restart()

    def lose_everything(self) -> None:
        """Kill it, remove its log, and start it again."""
        self.kill()
        shutil.rmtree(self._log_dir)
        self.restart()

    def __enter__(self) -> "LossyBroker":
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.stop()

    def _log(self) -> Path:
        [log] = self._log_dir.glob("*.incr.aof")
        return log
