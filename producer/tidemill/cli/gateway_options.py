"""How ``tidemill up`` runs a gateway."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.cli.child import ChildSpec

#: Addresses that mean all interfaces, one of which is this machine's own.
_ALL_INTERFACES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Where it listens; ``args`` and ``environment`` are given to it alone."""

    port: int
    host: str = "127.0.0.1"
    args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        host = self._own_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def spec(self, drain_seconds: float, environment: Mapping[str, str]) -> ChildSpec:
        """Return how to start it; ``environment`` is what all processes get."""
        args = ("--host", self.host, "--port", str(self.port), *self.args)
        return ChildSpec(
            "gateway",
            "tidemill.gateway",
            ("--drain-seconds", f"{drain_seconds:g}", *args),
            {**environment, **dict(self.environment)},
        )

    def is_listening(self) -> bool:
        """Whether somebody listens there."""
        try:
            with socket.create_connection((self._own_host, self.port), timeout=1.0):
                return True
        except OSError:
            return False

    @property
    def _own_host(self) -> str:
        return _ALL_INTERFACES.get(self.host, self.host)
