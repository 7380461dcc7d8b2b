"""A real server for the tests, and the check that they leave nothing behind in it."""

import os
from pathlib import Path

import pytest
import redis

from tidemill.protocol.errors import BrokerNotFound, BrokerUnsupported
from tidemill.protocol.keys import is_permanent
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.broker_binary import (
    MIN_VERSION,
    ServerBinary,
    find_server_binary,
    read_version,
)


def require_server_binary() -> ServerBinary:
    """The server to test against; without one skip on a developer's machine, fail in CI.

    ``TIDEMILL_TEST_SERVER`` names another binary than the one that Tidemill would start.
    """
    if chosen := os.environ.get("TIDEMILL_TEST_SERVER"):
        return read_binary(Path(chosen))
    try:
        return find_server_binary()
    except (BrokerNotFound, BrokerUnsupported) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(error.one_line())


def read_binary(path: Path) -> ServerBinary:
    """A server binary that must be there and be new enough."""
    version = read_version(path)
    assert version >= MIN_VERSION, f"{path} is no server >= 7.0, but {version}"
    return ServerBinary(path, version)


def start_fast_server(data_dir: Path) -> EmbeddedBroker:
    """A server that never waits for the disk; tests about durability start their own."""
    return EmbeddedBroker.start(data_dir, fsync="no", binary=require_server_binary())


def leaked_keys(client: redis.Redis) -> list[str]:
    """Keys that would live for ever although they are not on the permanent list."""
    # RQ keeps the names of its queues and registries for ever.
    ours = (key for key in client.scan_iter(count=1000) if not key.startswith(b"tm:rq:"))
    keys = [key for key in ours if not is_permanent(key)]
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.ttl(key)
        lifetimes = pipe.execute()
    return [key.decode() for key, ttl in zip(keys, lifetimes, strict=True) if ttl == -1]
