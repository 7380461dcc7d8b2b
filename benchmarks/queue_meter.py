"""A server to measure, and what a series of commands costs it in CPU and in wall time."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tidemill.protocol.functions import Field, ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect

#: Level -> (append-only file, appendfsync).
LEVELS = {"none": ("no", "everysec"), "everysec": ("yes", "everysec"), "always": ("yes", "always")}
TOOLS = ("valkey-benchmark", "redis-benchmark")

Command = tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What ``num`` operations cost: seconds of the server's CPU (all threads) and of wall time."""

    num: int
    cpu_seconds: float
    wall_seconds: float

    @property
    def per_cpu_second(self) -> float:
        """Operations for one second of the server's CPU, whatever else the machine did."""
        return self.num / self.cpu_seconds

    @property
    def per_second(self) -> float:
        """Operations in a second of wall time, with one client that never computes meanwhile."""
        return self.num / self.wall_seconds


class Server:
    """One running server with our library, a client for single calls and one raw connection."""

    def __init__(self, client: redis.Redis, socket_path: Path) -> None:
        self.client = client
        self.socket_path = socket_path
        self._connection: Any = client.connection_pool.get_connection()
        ensure_library(client)

    @property
    def cpu_seconds(self) -> float:
        """CPU that the server has used, user and system, since it started."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    @property
    def used_memory(self) -> int:
        """Bytes that the server has allocated."""
        return int(self.client.info("memory")["used_memory"])

    @property
    def version(self) -> str:
        """Name and version of the server."""
        info = self.client.info("server")
        if "valkey_version" in info:
            return f"Valkey {info['valkey_version']}"
        return f"Redis {info['redis_version']}"

    def empty(self) -> None:
        """Remove all keys; the functions stay."""
        self.client.execute_command("FLUSHALL", "SYNC")  # type: ignore[no-untyped-call]

    def send(
        self, commands: Sequence[Command], per_trip: int, num: int
    ) -> tuple[Sample, list[Any]]:
        """Send commands in pipelines of ``per_trip``; they count as ``num`` operations.

        The commands are put into wire form before the clock starts.  Raises the first error that
        the server answered with.
        """
        trips = [commands[i : i + per_trip] for i in range(0, len(commands), per_trip)]
        wires = [(self._connection.pack_commands(trip), len(trip)) for trip in trips]
        replies: list[Any] = []
        with self.metered(num) as samples:
            for wire, num_replies in wires:
                self._connection.send_packed_command(wire)
                replies += [self._connection.read_response() for _ in range(num_replies)]
        return samples[0], replies

    @contextmanager
    def metered(self, num: int) -> Iterator[list[Sample]]:
        """Measure what happens inside; the sample is in the list afterwards."""
        samples: list[Sample] = []
        cpu, started = self.cpu_seconds, time.perf_counter()
        yield samples
        wall = time.perf_counter() - started
        samples.append(Sample(num, self.cpu_seconds - cpu, wall))

    def close(self) -> None:
        """Give up all connections."""
        self._connection.disconnect()
        self.client.close()


@contextmanager
def start_server(data_dir: Path, level: str) -> Iterator[Server]:
    """Run an embedded server of a durability level on an empty directory."""
    append_only, fsync = LEVELS[level]
    policy: Any = fsync
    with EmbeddedBroker.start(data_dir, fsync=policy) as broker:
        server = Server(connect(broker.url, timeout_seconds=120.0), broker.settings.socket_path)
        try:
            server.client.config_set("appendonly", append_only)
            yield server
        finally:
            server.close()


def find_tool() -> str | None:
    """The load generator that comes with the servers, if one is on PATH."""
    return next((found for name in TOOLS if (found := shutil.which(name))), None)


def run_tool(server: Server, tool: str, command: Sequence[str], num: int, per_trip: int) -> Sample:
    """Let the servers' own load generator send a command, with one connection and pipelines."""
    options = ["-s", str(server.socket_path), "-c", "1", "-P", str(per_trip), "-n", str(num), "-q"]
    with server.metered(num) as samples:
        subprocess.run([tool, *options, *command], check=True, stdout=subprocess.DEVNULL)
    return samples[0]
