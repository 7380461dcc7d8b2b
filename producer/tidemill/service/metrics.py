"""The HTTP endpoint of a process: ``/metrics`` for Prometheus and ``/healthz`` for probes."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from tidemill.protocol.errors import PortInUse

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Metric
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "the metrics endpoint needs prometheus-client; run: pip install 'tidemill[scheduler]' or"
        " pip install 'tidemill[worker]'"
    ) from error

_log = logging.getLogger(__name__)

_CLIENT_TIMEOUT_SECONDS = 5.0
#: How often the server looks whether it shall close.
_CLOSE_SECONDS = 0.1


#: Whether the process makes progress, and what it can say about that, ready for JSON. Called for
#: each probe on a thread of the endpoint, so it must be quick and safe to call from there.
HealthCheck = Callable[[], tuple[bool, Mapping[str, Any]]]


class _Reply(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes


#: What is served at a path, given the request's Accept header.
_Route = Callable[[str], _Reply]


class MetricsServer:
    """Serves on its own threads from construction until ``close``; a context manager.

    ``port=0`` takes a free one, see ``port``. Raises ``PortInUse``.
    """

    def __init__(
        self,
        port: int,
        *,
        health: HealthCheck,
        registries: Sequence[CollectorRegistry] = (REGISTRY,),
        host: str = "127.0.0.1",
    ) -> None:
        routes: dict[str, _Route] = {
            "/metrics": partial(_metrics, _Registries(registries)),
            "/healthz": partial(_healthz, health),
        }
        try:
            self._server = _Server((host, port), partial(_Handler, routes))
        except (OSError, OverflowError) as error:
            raise PortInUse(
                f"the metrics port {port} on {host} cannot be used: {error}",
                fix="Choose another one, or 0 for any free port.",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving; may be repeated."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Server(ThreadingTCPServer):
    # Not an HTTPServer, which asks the DNS for the name of the host before it serves.
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_SECONDS

    def __init__(self, routes: Mapping[str, _Route], *arguments: Any) -> None:
        self._routes = routes
        super().__init__(*arguments)

    def do_GET(self) -> None:
        route = self._routes.get(self.path.partition("?")[0], _not_found)
        reply = route(self.headers.get("Accept", ""))
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(format, *arguments)


class _Registries(Collector):
    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()


def _metrics(registries: _Registries, accept: str) -> _Reply:
    encode, content_type = choose_encoder(accept)
    return _Reply(HTTPStatus.OK, content_type, encode(registries))


def _healthz(health: HealthCheck, accept: str) -> _Reply:
    try:
        ok, details = health()
    except Exception as error:
        # The outermost frame of a probe: whatever breaks the check, the process is not healthy.
        _log.exception("the health check failed")
        ok, details = False, {"error": type(error).__name__}
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    return _json(status, {"ok": ok, **details})


def _not_found(accept: str) -> _Reply:
    return _json(HTTPStatus.NOT_FOUND, {"error": "try /metrics or /healthz"})


def _json(status: HTTPStatus, content: Mapping[str, Any]) -> _Reply:
    return _Reply(status, "application/json", json.dumps(content).encode())
