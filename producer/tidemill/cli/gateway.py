"""``tidemill gateway``: the HTTP interface, and what ``tidemill up`` starts of it."""

import socket
import sys
from collections.abc import Iterable
from importlib.util import find_spec

import typer

from tidemill.protocol.errors import ConfigError, PortInUse

_PACKAGES = ("fastapi", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")
_MOST_PORTS = 100
DEFAULT_PORT = 8000


def gateway(context: typer.Context) -> None:
    """Serve OpenAI's API over HTTP: `tidemill gateway --port 8000`; see its --help."""
    require_gateway()
    # Imported here: the rest of the command line needs no HTTP server.
    from tidemill.gateway.__main__ import main

    sys.exit(main(context.args))


def has_gateway() -> bool:
    """Whether the packages that a gateway needs are installed."""
    return not _missing()


def require_gateway() -> None:
    """Raise ``ConfigError`` unless the packages that a gateway needs are installed."""
    if missing := _missing():
        raise ConfigError(
            f"the HTTP interface needs the package {missing[0]!r}",
            fix='Install it with: pip install "tidemill[gateway]", or leave it out: --no-gateway.',
        )


def _missing() -> list[str]:
    return [name for name in _PACKAGES if find_spec(name) is None]


def choose_port(host: str, wanted: int | None, default: int) -> int:
    """Return the port to serve at: the one that is wanted, else the first free from the default.

    Raises ``PortInUse``.
    """
    candidates: Iterable[int] = range(default, default + _MOST_PORTS)
    for port in candidates if wanted is None else [wanted]:
        if _is_free(host, port):
            return port
    told = f"{default} to {default + _MOST_PORTS - 1}" if wanted is None else str(wanted)
    raise PortInUse(
        f"port {told} of {host} is taken", fix="Choose another with --port, or use --no-gateway."
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
