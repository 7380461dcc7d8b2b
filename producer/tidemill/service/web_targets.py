"""Addresses that a tenant names for webhooks: those that may not be called are refused; pure.

A name may lead anywhere, and is looked at when it is resolved (``tidemill_webhooks``).
"""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.protocol.values import check_http_url

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS = (443, 8443)
_DEFAULT_PORTS = {"https": 443, "http": 80}

# ``ipaddress.is_global`` is wrong about several of these, and differently in each Python version.
_CLOSED_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # looks public, but is a cloud's own server inside every machine of it
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
#: All that is routed in public; the rest, NAT64 and what embeds IPv4 addresses among it, is closed.
_OPEN_V6 = ipaddress.IPv6Network("2000::/3")
_CLOSED_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)


class Blocked(Exception):
    """An address that webhooks may not be sent to.

    ``is_final`` if no later try can change that; ``is_inside`` if a name led where it must not.
    """

    def __init__(self, reason: str, *, is_final: bool, is_inside: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.is_inside = is_inside


@dataclass(frozen=True, slots=True)
class Target:
    """A checked URL, taken apart; ``path`` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """The ``Host`` of a request: the name, and the port if it is not the usual one."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"

    @property
    def origin(self) -> str:
        """What fails together: scheme, host and port."""
        return f"{self.scheme}://{self.host}:{self.port}"


def check_target(url: str, *, allow_private: bool = False) -> Target:
    """Take a URL apart; raises ``Blocked`` for a scheme, port, form or address that is not allowed.

    A host that is an address, in whatever spelling, must be a public one.

    ``allow_private`` is for development: http, any port, and later any address.
    """
    try:
        parts = urlsplit(check_http_url(url))
    except ValueError as error:
        raise Blocked(f"the address is not valid: {error}", is_final=True) from error
    port = _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    if not allow_private and parts.scheme != "https":
        raise Blocked("only https is allowed", is_final=True)
    if not allow_private and port not in PORTS:
        raise Blocked(f"only the ports {PORTS[0]} and {PORTS[1]} are allowed", is_final=True)
    literal = None if allow_private else _literal(parts.hostname or "")
    if literal is not None and not is_public(str(literal)):
        raise Blocked("the host is an address that is not public", is_final=True)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, parts.hostname or "", port, path)


def is_public(text: str) -> bool:
    """Whether an address is one that anybody could reach."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return _is_public_v6(address) if mapped is None else _is_public_v4(mapped)
    return _is_public_v4(address)


def _is_public_v4(address: ipaddress.IPv4Address) -> bool:
    return address.is_global and not any(address in network for network in _CLOSED_V4)


def _is_public_v6(address: ipaddress.IPv6Address) -> bool:
    if address.scope_id is not None or address not in _OPEN_V6 or not address.is_global:
        return False
    return not any(address in network for network in _CLOSED_V6)


def _literal(host: str) -> _Address | None:
    """Return the address that a host is by itself, in any spelling that resolvers take."""
    host = host.removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return ipaddress.IPv4Address("127.0.0.1")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass  # a name, or one of the older spellings: 127.1, 2130706433, 0x7f.1, 0177.0.0.1
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None
