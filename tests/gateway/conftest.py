"""One live Tidemill with a gateway and a tiny random model, shared by the tests of this folder."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.small_stacks import small_stack
from support.tiny_chat_model import save_tiny_chat_model
from tidemill import Producer
from tidemill.cli.gateway_options import GatewayOptions
from tidemill.cli.stack import Stack
from tidemill.cli.up import echo

MODEL = "tiny"


@dataclass(frozen=True)
class Site:
    """Where it runs: the gateway's address, the stack behind it, and the data of both.

    ``log`` is what all its processes have printed.
    """

    url: str
    stack: Stack
    model_dir: Path
    data_dir: Path
    log: list[str]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Embedded broker, scheduler, one worker, and a gateway on a free port."""
    model_dir = save_tiny_chat_model(tmp_path_factory.mktemp("model"))
    port, data_dir = free_port(), tmp_path_factory.mktemp("data")
    log: list[str] = []

    def sink(line: str) -> None:
        log.append(line)
        echo(line)

    with small_stack(
        model_dir,
        data_dir,
        *("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20)),
        name=MODEL,
        gateway=GatewayOptions(port=port),
        sink=sink,
    ) as stack:
        yield Site(f"http://127.0.0.1:{port}", stack, model_dir, data_dir, log)


@pytest.fixture
def producer(site: Site) -> Iterator[Producer]:
    """The SDK, for the same queue."""
    with Producer(site.stack.url, timeout=30) as client:
        yield client


def free_port() -> int:
    """Return a TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
