"""A receiver of webhooks that answers as a test wants, and remembers what came."""

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.tls import Authority


@dataclass(frozen=True)
class Received:
    """One request; ``server_name`` is what the client asked for in its TLS greeting."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    server_name: str | None = None


@dataclass(frozen=True)
class Answer:
    """What the receiver says; ``hold`` lets it wait for an event before that."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hold: threading.Event | None = None


class HookSink:
    """Listens on 127.0.0.1; ``answer`` is asked with each request."""

    def __init__(self, authority: Authority | None = None) -> None:
        self.received: list[Received] = []
        self.answer: Callable[[Received], Answer] = lambda _: Answer()
        self._names: dict[int, str | None] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave
        self._scheme = "http"
        if authority is not None:
            self._server.socket = self._encrypt(authority)
            self._scheme = "https"
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Its address, with the name that a certificate of ``make_authority`` is for."""
        return f"{self._scheme}://localhost:{self.port}/hooks?a=1"

    @property
    def ids(self) -> list[str]:
        """The event ids of all requests, in their order."""
        return [request.headers["webhook-id"] for request in self.received]

    def _encrypt(self, authority: Authority) -> ssl.SSLSocket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.certificate, authority.key)

        def note(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            self._names[id(connection)] = name

        context.sni_callback = note
        return context.wrap_socket(self._server.socket, server_side=True)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                name = sink._names.get(id(self.connection))
                headers = {key.lower(): value for key, value in self.headers.items()}
                request = Received(self.path, headers, body, name)
                sink.received.append(request)
                answer = sink.answer(request)
                if answer.hold is not None:
                    answer.hold.wait(60)
                self.send_response(answer.status)
                for key, value in answer.headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *_: object) -> None:
                return None

        return Handler

    def start(self) -> None:
        """Begin to listen."""
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def hook_sink(authority: Authority | None = None) -> Iterator[HookSink]:
    """A receiver that listens inside."""
    sink = HookSink(authority)
    sink.start()
    try:
        yield sink
    finally:
        sink.close()
