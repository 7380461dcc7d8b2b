"""One HTTP POST to a pinned address: no redirects, no proxies, nothing kept."""

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime

import h11

from tidemill._version import __version__
from tidemill.service.web_targets import Target
from tidemill_webhooks.schedule import Reply

#: Of a whole attempt, resolving and connecting included.
TOTAL_SECONDS = 20.0
#: Of one address, where a name has several.
CONNECT_SECONDS = 6.0
MAX_ADDRESSES = 3
#: Of an answer's body; the rest is not waited for.
MAX_BODY_BYTES = 64 * 1024
_READ_BYTES = 16 * 1024

USER_AGENT = f"Tidemill-Webhooks/{__version__}"


async def post(
    target: Target,
    addresses: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    tls: ssl.SSLContext,
) -> Reply:
    """Send ``body`` to the first of ``addresses`` that takes the connection.

    The certificate must be one of the target's name.  Raises ``OSError`` (``ssl.SSLError`` and
    ``ConnectionError`` are some) or ``h11.RemoteProtocolError``; the caller bounds the time.
    """
    reader, writer = await _connect(target, addresses, tls)
    try:
        connection = h11.Connection(h11.CLIENT)
        writer.write(_request(connection, target, headers, body))
        await writer.drain()
        return await _read_reply(connection, reader)
    finally:
        writer.transport.abort()


async def _connect(
    target: Target, addresses: Sequence[str], tls: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    # An address, never a name: what was checked is what is connected to.
    is_tls = target.scheme == "https"
    failure: OSError = ConnectionError("no address")
    for address in addresses[:MAX_ADDRESSES]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(
                    address,
                    target.port,
                    ssl=tls if is_tls else None,
                    server_hostname=target.host if is_tls else None,
                )
        except OSError as error:
            failure = error
    raise failure


def _request(
    connection: h11.Connection, target: Target, headers: Mapping[str, str], body: bytes
) -> bytes:
    fields = {
        "Host": target.host_header,
        "User-Agent": USER_AGENT,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    request = h11.Request(method="POST", target=target.path, headers=list(fields.items()))
    parts = (request, h11.Data(data=body), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)


async def _read_reply(connection: h11.Connection, reader: asyncio.StreamReader) -> Reply:
    while not isinstance(event := await _next_event(connection, reader), h11.Response):
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the connection was closed without an answer")
    reply = Reply(event.status_code, _retry_after(dict(event.headers)))
    # Reading lets the receiver end its answer in peace; what it says, and whether it ever ends,
    # changes nothing.
    with suppress(OSError, h11.RemoteProtocolError, TimeoutError):
        async with asyncio.timeout(1.0):
            await _skip_body(connection, reader)
    return reply


async def _skip_body(connection: h11.Connection, reader: asyncio.StreamReader) -> None:
    num_bytes = 0
    while num_bytes <= MAX_BODY_BYTES:
        event = await _next_event(connection, reader)
        if not isinstance(event, h11.Data):
            return
        num_bytes += len(event.data)


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_READ_BYTES))
    return event


def _retry_after(headers: Mapping[bytes, bytes]) -> float:
    text = headers.get(b"retry-after", b"").decode("ascii", "replace").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
