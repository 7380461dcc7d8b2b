"""Serving the application: uvicorn, its socket, and how it ends."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
import uvloop

from tidemill.gateway.app import create_app
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.garbage import collect_seldom
from tidemill.gateway.http_protocol import bounded
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import ConfigError, PortInUse
from tidemill.service.runtime import Drain, StopSignal

_log = logging.getLogger(__name__)

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to ``Drain``, which ends all our processes in the same way."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; answers that run then may finish, a second signal ends them.

    Raises ``PortInUse``, or ``ConfigError`` if the files for TLS cannot be used.
    """
    check_certificate(settings)
    with listen(settings.host, settings.port) as listener, Drain() as drain:
        uvloop.run(_serve(settings, listener, drain))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that will listen there; raises ``PortInUse``."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
    except OSError as error:
        raise _unusable(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def check_certificate(settings: GatewaySettings) -> None:
    """Raise ``ConfigError`` unless certificate and key fit each other, where there are any."""
    if settings.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{settings.ssl_certfile} and {settings.ssl_keyfile} cannot be used: {error}",
            fix="Give a certificate chain and its key, both in PEM and without a password.",
        ) from error


def _unusable(host: str, port: int, error: OSError) -> PortInUse:
    return PortInUse(
        f"port {port} of {host} cannot be used: {error.strerror or error}",
        fix="Choose another with --port, or 0 for any free one.",
    )


async def _serve(settings: GatewaySettings, listener: socket.socket, drain: Drain) -> None:
    state = GatewayState(settings)
    server = _Server(_config(settings, state))
    collect_seldom()
    watches = [
        asyncio.create_task(_drain(server, state, drain.draining)),
        asyncio.create_task(_stop(server, drain.stopping)),
    ]
    port = listener.getsockname()[1]
    _log.info("serving %s://%s:%d/v1", settings.scheme, settings.host, port)
    try:
        await server.serve(sockets=[listener])
    finally:
        for watch in watches:
            watch.cancel()


def _config(settings: GatewaySettings, state: GatewayState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        loop="none",
        http=bounded(settings.head_seconds, settings.reader_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=None if settings.access_log else logging.WARNING,
        access_log=settings.access_log,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(settings.keep_alive_seconds),
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


async def _drain(server: _Server, state: GatewayState, draining: StopSignal) -> None:
    await draining.wait_async()
    _log.info("draining: no new connections, finishing %d answers", state.metrics.num_open)
    state.is_draining = True
    server.should_exit = True


async def _stop(server: _Server, stopping: StopSignal) -> None:
    await stopping.wait_async()
    server.force_exit = True
