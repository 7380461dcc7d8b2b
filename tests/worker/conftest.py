"""A worker with a fake model that serves the test's broker."""

from collections.abc import Iterator

import pytest
import redis

from support import shard
from support.worker_rig import Rig


@pytest.fixture
def epoch(redis_client: redis.Redis) -> int:
    """The test leads the shard."""
    return shard.lead(redis_client)


@pytest.fixture
def rig(redis_client: redis.Redis, redis_url: str, epoch: int) -> Iterator[Rig]:
    """A running worker whose model waits for permission for each step."""
    rig = Rig(redis_client, redis_url, epoch)
    with rig.running():
        yield rig
