"""Where a webhook may go: no address of a tenant's choice may reach what only we can reach."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.protocol.values import check_http_url

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: From a host name and a port to its addresses.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

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
    """An address that webhooks may not be sent to; ``is_final`` if no later try can change that."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


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
    """Take a URL apart; raises ``Blocked`` for a scheme, port or form that is not allowed.

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


async def pin(target: Target, resolve: Resolver, *, allow_private: bool = False) -> list[str]:
    """Resolve a target once; returns the addresses to connect to, and no name.

    All must be public, for whoever controls the name chooses which of them we take.  Raises
    ``Blocked``, which does not say where the name led to.
    """
    try:
        addresses = list(dict.fromkeys(await resolve(target.host, target.port)))
    except (OSError, UnicodeError) as error:
        raise Blocked("the host name cannot be resolved", is_final=False) from error
    if not addresses:
        raise Blocked("the host name has no address", is_final=False)
    if not allow_private and not all(map(is_public, addresses)):
        raise Blocked("the host leads to an address that is not public", is_final=False)
    return addresses


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Ask the system's resolver; raises ``OSError`` or ``UnicodeError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]
