"""A throw-away certificate authority, and a proxy that speaks TLS for a server that cannot."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import pytest

_CHUNK = 65536


@dataclass(frozen=True)
class Authority:
    """A CA and a certificate that it gave to a server called ``localhost``."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def server_options(self) -> tuple[str, ...]:
        """What a server with TLS of its own needs."""
        files = ("--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key))
        return (*files, "--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "no")


def make_authority(directory: Path) -> Authority:
    """Make both; skips the test where there is no ``openssl`` command."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    directory.mkdir()
    made = Authority(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    ca_key, request, extensions = (directory / name for name in ("ca.key", "csr.pem", "ext"))
    extensions.write_text("subjectAltName=DNS:localhost\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    named = ("-subj", f"/CN=CA {directory.name}")
    _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", made.ca, *named)
    _openssl("req", *new_key, "-keyout", made.key, "-out", request, "-subj", "/CN=server")
    signer = ("-CA", made.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2")
    _openssl(
        "x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", made.certificate
    )
    return made


class TlsProxy:
    """Stands before the server at ``url``; ``port`` of 127.0.0.1 leads through it."""

    def __init__(self, url: str, authority: Authority) -> None:
        self._path = urlsplit(url).path
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(authority.certificate, authority.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
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

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._sockets.append(client)
        # A client that refuses the certificate, or either end that goes, ends the connection.
        with contextlib.suppress(OSError), self._context.wrap_socket(client, True) as encrypted:
            server = socket.socket(socket.AF_UNIX)
            self._sockets += [encrypted, server]
            server.connect(self._path)
            threading.Thread(target=_pump, args=(server, encrypted), daemon=True).start()
            _pump(encrypted, server)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
