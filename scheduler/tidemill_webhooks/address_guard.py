"""Where a webhook may go: no address of a tenant's choice may reach what only we can reach."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from tidemill.service.web_targets import Blocked, Target, is_public

#: From a host name and a port to its addresses.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


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
        raise Blocked(
            "the host leads to an address that is not public", is_final=False, is_inside=True
        )
    return addresses


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Ask the system's resolver; raises ``OSError`` or ``UnicodeError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]
