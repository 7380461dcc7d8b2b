"""Servers on TCP ports that work together, replicas, sentinels, clusters, and their users."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.crc import key_slot

from support.scheduler_process import SchedulerProcess, spawn_scheduler, wait_for_leader
from support.valkey import require_server_binary
from support.wait import wait_until
from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker_binary import ServerBinary
from tidemill.service.embedded_broker import ping
from tidemill.service.redis import connect
from tidemill.service.server_process import ServerProcess

TESTS = Path(__file__).parents[1]
NUM_SLOTS = 16384


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Node:
    """One server on a port of 127.0.0.1."""

    port: int
    process: ServerProcess
    log_path: Path

    def client(self) -> redis.Redis:
        """A plain client of this very node."""
        return connect(f"redis://127.0.0.1:{self.port}", retries=0)

    def ask(self, *command: str | int) -> object:
        """Send one command to this very node."""
        with self.client() as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        """End it without any clean-up."""
        with self.client() as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGKILL)
        assert self.process.has_exited(within_seconds=30)


@contextmanager
def node(
    directory: Path, *options: str | int, binary: ServerBinary | None = None, port: int = 0
) -> Iterator[Node]:
    """Start a server with some options of its own and wait until it answers."""
    directory.mkdir(parents=True)
    port = port or free_port()
    command = [str((binary or require_server_binary()).path)]
    if "--sentinel" in options:
        # A sentinel writes what it learns into its configuration file.
        config = directory / "sentinel.conf"
        config.touch()
        command.append(str(config))
    else:
        command += ["--save", ""]
    words = ("--port", port, "--bind", "127.0.0.1", "--dir", directory, *options)
    process = ServerProcess([*command, *map(str, words)], log_file=directory / "log")
    started = Node(port, process, directory / "log")
    try:
        with started.client() as client:
            wait_until(lambda: ping(client) == "ready", 30, "the server answers")
        yield started
    finally:
        process.stop()


@dataclass
class Cluster:
    """Masters that share the slots in equal ranges, in order, unless a test moves some.

    One more node, ``spare``, holds nothing.
    """

    nodes: list[Node]
    spare: Node

    @property
    def url(self) -> str:
        """An address that names two of the nodes."""
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        return f"redis+cluster://{seeds}"

    def owner(self, shard: str) -> Node:
        """The node that holds a shard by the word of the first node that answers."""
        slot = slot_of(shard)
        for asked in (*self.nodes, self.spare):
            with asked.client() as client:
                if ping(client) != "ready":
                    continue
                for first, last, master, *_ in client.execute_command("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return next(n for n in (*self.nodes, self.spare) if n.port == master[1])
        raise AssertionError(f"nobody owns slot {slot}")

    def replicate(self, shard: str) -> Node:
        """Make the spare node follow the one that holds a shard; returns the latter."""
        master = self.owner(shard)
        self.spare.ask("CLUSTER", "REPLICATE", _text(master.ask("CLUSTER", "MYID")))

        def is_in_sync() -> bool:
            with self.spare.client() as client:
                return bool(client.info("replication").get("master_link_status") == "up")

        wait_until(is_in_sync, 20, "the replica is in sync")
        return master

    def move(self, shard: str, target: Node) -> None:
        """Move a shard with all its keys to another node, as ``redis-cli`` does."""
        slot, source = slot_of(shard), self.owner(shard)
        ids = {node.port: _text(node.ask("CLUSTER", "MYID")) for node in (source, target)}
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            assert isinstance(keys, list)
            where = ("127.0.0.1", target.port, "", 0, 5000, "KEYS")
            source.ask("MIGRATE", *where, *(key.decode() for key in keys))
        for changed in (target, source):
            changed.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])


@contextmanager
def cluster(
    directory: Path, *options: str, num_nodes: int = 3, binary: ServerBinary | None = None
) -> Iterator[Cluster]:
    """Start the nodes and join them."""
    with ExitStack() as stack:
        *nodes, spare = [
            stack.enter_context(cluster_node(directory / f"node-{number}", *options, binary=binary))
            for number in range(num_nodes + 1)
        ]
        for number, started in enumerate(nodes):
            first, end = (NUM_SLOTS * n // num_nodes for n in (number, number + 1))
            started.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for started in (*nodes[1:], spare):
            _meet(started, nodes[0])
        for started in (*nodes, spare):
            wait_until(lambda node=started: _is_ok(node), 20, "the cluster forms")  # type: ignore[misc]
        yield Cluster(nodes, spare)


@contextmanager
def cluster_node(
    directory: Path, *options: str, binary: ServerBinary | None = None
) -> Iterator[Node]:
    """Start a node that knows nobody and holds nothing."""
    bus = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    quick = ("--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0")
    with node(directory, *bus, *quick, *options, binary=binary) as started:
        yield started


def _meet(newcomer: Node, member: Node) -> None:
    """Let a node join."""
    bus_port = _config(member, "cluster-port")
    newcomer.ask("CLUSTER", "MEET", "127.0.0.1", member.port, bus_port)


def _is_ok(asked: Node) -> bool:
    """Whether a node sees the whole cluster."""
    return "cluster_state:ok" in _text(asked.ask("CLUSTER", "INFO"))


def slot_of(shard: str) -> int:
    """The slot of a shard."""
    return key_slot(ShardKeys(shard).prefix.encode())


@contextmanager
def served(
    url: str, directory: Path, *, shards: Sequence[str] = ("00",), step_seconds: float = 0.005
) -> Iterator[list[SchedulerProcess]]:
    """A scheduler process and a worker process with the fake model for each shard."""
    with ExitStack() as stack:
        schedulers, workers = [], []
        for shard in shards:
            log_path = directory / f"scheduler-{shard}.log"
            schedulers.append(spawn_scheduler(url, log_path, options=("--shard", shard)))
            stack.callback(schedulers[-1].kill)
            worker = _spawn_worker(url, directory / f"worker-{shard}.log", step_seconds, shard)
            workers.append(stack.enter_context(worker))
        for shard, process in zip(shards, workers, strict=True):
            assert process.stdout is not None
            told = (directory / f"worker-{shard}.log").read_text
            assert process.stdout.readline().startswith("wkr_"), f"no worker of {shard}: {told()}"
            with connect(url, shard=shard) as client:
                wait_for_leader(client, shard=shard)
        yield schedulers


@contextmanager
def _spawn_worker(
    url: str, log_path: Path, step_seconds: float, shard: str
) -> Iterator[subprocess.Popen[str]]:
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    command = [sys.executable, "-m", "support.shard_worker", url, str(step_seconds), shard]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with (
        log_path.open("ab") as log,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _config(asked: Node, name: str) -> int:
    with asked.client() as client:
        return int(client.config_get(name)[name])


def _text(reply: object) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
