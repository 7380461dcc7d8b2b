"""A TCP proxy whose connections can go dead without being closed, as after a lost NAT entry."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK = 65536


class HalfOpenProxy:
    """Stands between a client and the server at ``url``; ``url`` of its own leads through it."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stalled: list[threading.Event] = []
        self._sockets: list[socket.socket] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for open_socket in (self._listener, *self._sockets):
            # Wakes the thread that blocks on it; fails if the other end was faster.
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()

    def stall(self) -> None:
        """Swallow whatever the present connections carry from now on; new ones work."""
        for stalled in self._stalled:
            stalled.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server, stalled = self._connect(), threading.Event()
            self._sockets += [client, server]
            self._stalled.append(stalled)
            self._start(_pump, client, server, stalled)
            self._start(_pump, server, client, stalled)

    def _connect(self) -> socket.socket:
        if self._server.scheme == "unix":
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server.path)
            return server
        return socket.create_connection((self._server.hostname or "", self._server.port or 0))

    def _start(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, stalled: threading.Event) -> None:
    # Either end may go at any time; that is the end of the connection.
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            if not stalled.is_set():
                sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)
