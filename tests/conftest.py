"""Fixtures every test may use, and the environment that torch and its friends need."""

import os

# Before anything imports torch. Spinning OpenMP threads starve the other processes of a test on
# small machines; the Triton interpreter must fuse multiply-adds as the GPU does.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# RQ reads it when it is imported, which some tests do before our own module does.
os.environ["RQ_KEY_PREFIX"] = "tm:rq"

import atexit
import gc
import signal
from collections.abc import Generator, Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings

from support.measured import pytest_terminal_summary as pytest_terminal_summary
from support.models import demo_model_dir as demo_model_dir
from support.process_groups import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from support.process_groups import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from support.valkey import leaked_keys, start_fast_server
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect

#: What tests change of the server that they share.
SETTINGS = ("maxmemory", "appendfsync", "min-replicas-to-write", "client-output-buffer-limit")

# How long an example takes tells of the machine alone.
settings.register_profile(
    "patient", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaks_keys: may leave Redis keys without a TTL behind")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is for what a shell starts in the background; tests interrupt, and children inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage among millions of objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Libraries look for what is left of theirs when the interpreter ends.
        atexit.register(gc.unfreeze)
        gc.enable()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One server for the whole session; its content is flushed before each test."""
    with start_fast_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def redis_url(valkey_server: EmbeddedBroker) -> Iterator[str]:
    """The address of an empty server, whose settings are put back afterwards."""
    with connect(valkey_server.url) as client:
        client.flushall()
        before = client.config_get(*SETTINGS)
    yield valkey_server.url
    with connect(valkey_server.url) as client:
        for name, value in before.items():
            client.config_set(name, value)


@pytest.fixture
def redis_client(redis_url: str, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A client of an empty server; afterwards no key may live for ever that should not."""
    with connect(redis_url, client_name="tests") as client:
        ensure_library(client)
        yield client
        if request.node.get_closest_marker("leaks_keys") is None:
            leaked = leaked_keys(client)
            assert not leaked, f"keys without a TTL: {leaked}"
