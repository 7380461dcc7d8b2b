"""The check that runs after every test with a client must itself be able to fail."""

import pytest
import redis

from support.valkey import leaked_keys
from tidemill.protocol.keys import ShardKeys


@pytest.mark.leaks_keys
def test_only_keys_that_would_wrongly_live_for_ever_are_leaks(redis_client: redis.Redis) -> None:
    keys = ShardKeys("00")
    redis_client.hset(keys.job("job_00X"), "st", "done")
    redis_client.set("expires", "soon", ex=60)
    redis_client.zadd(keys.workers, {"w1": 1})
    assert leaked_keys(redis_client) == [keys.job("job_00X")]


def test_the_next_test_starts_with_an_empty_server(redis_client: redis.Redis) -> None:
    assert redis_client.dbsize() == 0
