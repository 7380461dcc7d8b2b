"""A TCP port before a server: moves to another one, and loses requests and replies, on command."""

import contextlib
import socket
import threading
from typing import Literal

Loss = Literal["request", "reply"]

_BUFFER_BYTES = 65_536


class Forwarder:
    """Forwards every connection to the server behind a Unix socket, or at ``host:port``.

    A context manager.
    """

    def __init__(self, socket_path: str) -> None:
        self._target = socket_path
        self._lossy_word = b""
        self._loses_request = False
        self._num_losses = 0
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="forwarder", daemon=True).start()

    @property
    def url(self) -> str:
        """The address of the port."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def move_to(self, socket_path: str) -> None:
        """Cut all connections; new ones go to another server."""
        with self._lock:
            self._target = socket_path
            pairs = list(self._pairs)
        for pair in pairs:
            pair.cut()

    def lose(self, what: Loss, word: bytes, *, times: int = 1) -> None:
        """Cut off the next ``times`` requests with ``word`` in them, or the replies to them."""
        with self._lock:
            self._lossy_word, self._loses_request = word, what == "request"
            self._num_losses = times

    @property
    def has_lost(self) -> bool:
        """Whether what was to be lost is lost."""
        return not self._num_losses

    def loss_of(self, request: bytes) -> Loss | None:
        """What to lose of an exchange that begins with ``request``."""
        with self._lock:
            if not self._num_losses or self._lossy_word not in request:
                return None
            return "request" if self._loses_request else "reply"

    def note_loss(self) -> None:
        """Count what was lost."""
        with self._lock:
            self._num_losses = max(0, self._num_losses - 1)

    def forget(self, pair: "_Pair") -> None:
        """Drop a pair that was cut."""
        with self._lock:
            self._pairs.discard(pair)

    def close(self) -> None:
        """Stop listening and cut all connections."""
        # Closing alone does not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.move_to("")

    def __enter__(self) -> "Forwarder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        with self._lock:
            target = self._target
        try:
            server = _dial(target)
        except OSError:
            client.close()
            return
        pair = _Pair(self, client, server)
        with self._lock:
            self._pairs.add(pair)
        pair.start()


def _dial(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    if port.isdecimal():
        return socket.create_connection((host, int(port)))
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(target)
    except OSError:
        server.close()
        raise
    return server


class _Pair:
    def __init__(self, owner: Forwarder, client: socket.socket, server: socket.socket) -> None:
        self._owner = owner
        self._client = client
        self._server = server
        self._loses_reply = False

    def start(self) -> None:
        for pump in (self._pump_requests, self._pump_replies):
            threading.Thread(target=pump, name="forwarder-pump", daemon=True).start()

    def cut(self) -> None:
        self._owner.forget(self)
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _pump_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(_BUFFER_BYTES):
                loss = self._owner.loss_of(data)
                if loss == "request":
                    self._owner.note_loss()
                    break
                self._loses_reply |= loss == "reply"
                self._server.sendall(data)
        self.cut()

    def _pump_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(_BUFFER_BYTES):
                if self._loses_reply:
                    self._owner.note_loss()
                    break
                self._client.sendall(data)
        self.cut()
