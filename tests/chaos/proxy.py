"""A TCP proxy before the broker that breaks connections on command, one port per role.

``python -m chaos.proxy SOCKET ROLE...`` prints one line with the ports as JSON and reads commands
from its standard input, one JSON object a line: ``{"role", "mode", "seconds"}``.

reset          every connection is reset
lose_replies   whoever is answered within the time finds its connection reset instead
lose_requests  whoever asks within the time finds its connection reset, the request undelivered
half_open      present connections swallow everything from now on and stay open
delay          everything takes longer
hold           requests on present connections arrive only when the time is over, late and perhaps
               after their senders have sent them again elsewhere
calm           nothing is broken any more but what is half-open
upstream       new connections go to the socket at ``path``
"""

import asyncio
import json
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

_DELAY_SECONDS = 0.15
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Weather:
    """What befalls the connections of one role; times are those of the event loop."""

    socket_path: str
    links: "set[Link]" = field(default_factory=set)
    until: dict[str, float] = field(default_factory=dict)

    def prevails(self, mode: str, now: float) -> bool:
        """Whether a mode is on."""
        return now < self.until.get(mode, 0.0)

    def change(self, mode: str, seconds: float, now: float) -> None:
        """Obey one command."""
        if mode == "calm":
            self.until.clear()
        elif mode == "reset":
            for link in list(self.links):
                link.reset()
        elif mode == "half_open":
            for link in self.links:
                link.is_dead = True
        elif mode == "hold":
            for link in self.links:
                link.held_until = now + seconds
        else:
            self.until[mode] = now + seconds


class Link:
    """One client's connection and its continuation to the broker."""

    def __init__(self, weather: Weather) -> None:
        self.is_dead = False
        self.held_until = 0.0
        self._loop = asyncio.get_running_loop()
        self._weather = weather
        self._ends: dict[str, asyncio.Transport] = {}
        self._early: list[bytes] = []
        self._last = {"requests": 0.0, "replies": 0.0}
        self._queued = {"requests": 0, "replies": 0}
        weather.links.add(self)

    def opened(self, way: str, transport: asyncio.Transport) -> None:
        """One end is there: the sender of ``way``."""
        self._ends[way] = transport
        if way == "requests":
            self._connecting = self._loop.create_task(self._connect())
        else:
            for data in self._early:
                transport.write(data)

    async def _connect(self) -> None:
        try:
            await self._loop.create_unix_connection(
                lambda: End(self, "replies"), self._weather.socket_path
            )
        except OSError:
            self.reset()

    def received(self, way: str, data: bytes) -> None:
        """Pass on, delay, lose or swallow what the sender of ``way`` has sent."""
        if self.is_dead:
            return
        now = self._loop.time()
        if self._weather.prevails(f"lose_{way}", now):
            self.reset()
            return
        due = now + (_DELAY_SECONDS if self._weather.prevails("delay", now) else 0.0)
        if way == "requests":
            due = max(due, self.held_until)
        if due <= now and not self._queued[way]:
            self._write(way, data)
            return
        # Strictly later than its predecessor: timers of the same time have no order.
        self._last[way] = due = max(due, self._last[way] + 1e-5)
        self._queued[way] += 1
        self._loop.call_at(due, self._write_queued, way, data)

    def _write_queued(self, way: str, data: bytes) -> None:
        self._queued[way] -= 1
        self._write(way, data)
        if way == "requests" and not self._queued[way] and "requests" not in self._ends:
            self._close()

    def _write(self, way: str, data: bytes) -> None:
        other = self._ends.get("replies" if way == "requests" else "requests")
        if other is not None and not other.is_closing():
            other.write(data)
        elif way == "requests":
            self._early.append(data)

    def lost(self, way: str) -> None:
        """An end has closed; a request that is held arrives nevertheless."""
        self._ends.pop(way, None)
        if way == "requests" and self._queued[way]:
            return
        self._close()

    def _close(self) -> None:
        self._weather.links.discard(self)
        for transport in list(self._ends.values()):
            transport.close()

    def reset(self) -> None:
        """Break the connection so that the client notices at once."""
        self._weather.links.discard(self)
        client = self._ends.get("requests")
        if client is not None:
            raw = client.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for transport in list(self._ends.values()):
            transport.abort()


class End(asyncio.Protocol):
    """One of the two sockets of a link."""

    def __init__(self, link: Link, way: str) -> None:
        self._link = link
        self._way = way

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link.opened(self._way, transport)

    def data_received(self, data: bytes) -> None:
        self._link.received(self._way, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost(self._way)


async def serve(socket_path: str, roles: list[str]) -> None:
    """Serve until the standard input ends."""
    loop = asyncio.get_running_loop()
    weathers = {role: Weather(socket_path) for role in roles}
    ports = {}
    for role, weather in weathers.items():
        server = await loop.create_server(
            lambda weather=weather: End(Link(weather), "requests"), "127.0.0.1", 0
        )
        ports[role] = server.sockets[0].getsockname()[1]
    print(json.dumps(ports), flush=True)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        command: dict[str, Any] = json.loads(line)
        weather = weathers[command["role"]]
        if command["mode"] == "upstream":
            weather.socket_path = command["path"]
        else:
            weather.change(command["mode"], command["seconds"], loop.time())


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
