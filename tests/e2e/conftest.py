"""A whole Tidemill with the real model, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill import Producer
from tidemill.cli.stack import Stack, StackOptions
from tidemill.cli.up import echo, thread_environment

MODEL_NAME = "smollm2-135m-instruct"
LEASES = (("TIDEMILL_LEASE_SECONDS", "2.5"), ("TIDEMILL_BEAT_SECONDS", "0.8"))


def stack_options(model_dir: Path, data_dir: Path, *, workers: int = 1) -> StackOptions:
    """The real model in float32, so that tokens are exact, with short leases."""
    return StackOptions(
        redis_url=None,
        data_dir=data_dir,
        fsync="always",
        num_workers=workers,
        worker_args=(
            *("--model", str(model_dir), "--served-model-name", MODEL_NAME),
            *("--device", "cpu", "--dtype", "float32", "--max-model-len", "2048"),
            *("--kv-cache-memory-bytes", str(400_000_000)),
        ),
        environment=(*LEASES, *thread_environment(workers, None)),
    )


@pytest.fixture(scope="session")
def stack(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Broker with ``appendfsync always``, scheduler, one worker."""
    options = stack_options(demo_model_dir, tmp_path_factory.mktemp("stack"))
    with Stack(options, sink=echo) as running:
        yield running


@pytest.fixture
def producer(stack: Stack) -> Iterator[Producer]:
    """A client of the stack."""
    with Producer(stack.url, timeout=30) as client:
        yield client
