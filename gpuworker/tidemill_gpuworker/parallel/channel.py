"""Messages between the leader and one of its ranks, over a pair of sockets."""

import socket
import struct
import threading
from typing import Any

from tidemill.protocol.codec import pack, unpack
from tidemill.protocol.errors import EngineFailed

_LENGTH = struct.Struct(">I")
_MAX_BYTES = 1 << 30
_FIX = "Start the worker again; the log of the rank says why it ended."


class Channel:
    """One end; a message is a name and a msgpack map, after its length in 4 bytes.

    The system closes the other end however its process ends, and an idle channel costs nothing.
    """

    def __init__(self, end: socket.socket, peer: str, *, send_seconds: float | None = None) -> None:
        self._socket = end
        self._peer = peer
        self._send_seconds = send_seconds
        # An adapter is sent by the thread that loads it, while steps go on.
        self._lock = threading.Lock()

    def send(self, name: str, fields: dict[str, Any] | None = None) -> None:
        """Send a message; raises ``EngineFailed`` if the peer is gone or does not read."""
        body = pack([name, fields or {}])
        try:
            with self._lock:
                self._socket.settimeout(self._send_seconds)
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise EngineFailed(f"{self._peer} takes no orders: {error}", fix=_FIX) from error

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for a message; raises ``EngineFailed`` once the peer is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        name, fields = unpack(self._read(length), max_bytes=_MAX_BYTES)
        return name, fields

    def close(self) -> None:
        """Let the peer see the end."""
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        try:
            self._socket.settimeout(None)
            while view:
                received = self._socket.recv_into(view)
                if not received:
                    raise EngineFailed(f"{self._peer} is gone", fix=_FIX)
                view = view[received:]
        except OSError as error:
            raise EngineFailed(f"{self._peer} is gone: {error}", fix=_FIX) from error
        return bytes(data)
