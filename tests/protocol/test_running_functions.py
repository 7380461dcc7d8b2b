"""How functions are called and loaded, whatever they do, against a real server."""

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.errors import BrokerUnavailable, StaleEpoch
from tidemill.protocol.functions import LIBRARY, LUA_SOURCE, ensure_library, run_each, run_many

pytestmark = pytest.mark.leaks_keys


def test_many_calls_share_a_round_trip_and_keep_their_errors_apart(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    jobs = [shard.submit(redis_client) for _ in range(2)]
    batch = [
        calls.dispatch(
            KEYS,
            job_id=job,
            queue=QUEUE,
            entry_id=shard.entry_of(redis_client, job),
            worker_id="wkr_a",
            epoch=epoch + wrong,
            lease_ms=1000,
        )
        for job, wrong in zip(jobs, (0, 1), strict=True)
    ]
    good, bad = run_many(redis_client, batch)
    assert isinstance(good, calls.Dispatched) and good.fence == 1
    assert isinstance(bad, StaleEpoch)


def test_calls_may_fail_alone_with_errors_of_the_server_too(redis_client: redis.Redis) -> None:
    redis_client.set(KEYS.leader, "sch_a", px=60_000)
    redis_client.lpush(KEYS.epoch, "not a number")
    redis_client.pexpire(KEYS.epoch, 60_000)
    batch = [
        calls.lead(KEYS, scheduler_id=scheduler_id, lease_ms=1000)
        for scheduler_id in ("sch_a", "sch_b")
    ]
    failed, refused = run_each(redis_client, batch)
    assert isinstance(failed, redis.ResponseError) and "WRONGTYPE" in str(failed)
    assert refused == 0


def test_loading_the_library_again_is_harmless_and_repairs_another_version(
    redis_client: redis.Redis,
) -> None:
    ensure_library(redis_client)
    redis_client.function_load(LUA_SOURCE.replace("TERMINAL", "FINAL"), replace=True)
    ensure_library(redis_client)
    [library] = redis_client.function_list(library=LIBRARY, withcode=True)
    assert LUA_SOURCE.encode() in library


def test_a_server_whose_memory_is_full_is_not_called_unsupported(
    redis_client: redis.Redis,
) -> None:
    [limit] = redis_client.config_get("maxmemory").values()
    redis_client.function_delete(LIBRARY)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerUnavailable, match="memory is full"):
            ensure_library(redis_client)
    finally:
        redis_client.config_set("maxmemory", limit)
