"""Function libraries of versions that nobody runs any more."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS, StartScheduler
from support.shard import KEYS, submit
from support.wait import wait_until
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.library import VERSION, library_name, library_source
from tidemill.service.redis import connect_async
from tidemill_scheduler.upkeep.libraries import Libraries, older_libraries

OLD = library_name(VERSION - 1)
NEWER = library_name(VERSION + 1)
HOUR_MS = 3_600_000


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


@pytest.fixture(autouse=True)
def three_versions(redis_client: redis.Redis) -> Iterator[None]:
    """Ours, the one before and the one after."""
    for version in (VERSION - 1, VERSION + 1):
        redis_client.function_load(library_source(version), replace=True)
    yield
    for name in loaded(redis_client) & {OLD, NEWER}:
        redis_client.function_delete(name)


def loaded(client: redis.Redis) -> set[str]:
    return {library[1].decode() for library in client.function_list(library="tm*")}


def announce(client: redis.Redis, library: str, in_ms: int, shard: str = "00") -> None:
    until = round(time.time() * 1000) + in_ms
    client.zadd(ShardKeys(shard).libraries, {library: until})


@pytest.mark.parametrize("name", ["tm0", "tm01", "tmx", "tm", f"tm{VERSION}", NEWER, "other"])
def test_only_libraries_of_earlier_versions_are_looked_at(name: str) -> None:
    assert older_libraries([name, OLD]) == [OLD]


async def test_a_library_is_deleted_once_its_last_announcement_has_run_out(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    announce(redis_client, OLD, HOUR_MS)
    announce(redis_client, NEWER, -HOUR_MS)
    libraries = Libraries(client, KEYS)
    await libraries.delete_unused()
    assert OLD in loaded(redis_client)

    announce(redis_client, OLD, -HOUR_MS)
    await libraries.delete_unused()

    assert loaded(redis_client) == {library_name(), NEWER}


def test_a_full_server_with_an_older_library_is_led_all_the_same(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    worker = PuppetWorker(redis_client)
    job_id = submit(redis_client)
    redis_client.config_set("maxmemory", 1)
    try:
        scheduler = start_scheduler()
        wait_until(lambda: "the upkeep waits" in scheduler.log, LIVENESS_SECONDS)
        [claim] = wait_until(worker.read, LIVENESS_SECONDS)
        assert (claim.job_id, worker.finish(claim).accepted) == (job_id, True)
    finally:
        redis_client.config_set("maxmemory", 0)

    assert "starts over" not in scheduler.log
    assert redis_client.get(KEYS.epoch) == b"1"


async def test_a_library_that_another_shard_uses_stays(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    announce(redis_client, OLD, -HOUR_MS)
    announce(redis_client, OLD, HOUR_MS, shard="a7")

    await Libraries(client, KEYS).delete_unused()

    assert OLD in loaded(redis_client)


async def test_a_library_that_nobody_has_announced_yet_gets_a_day(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    await Libraries(client, KEYS).delete_unused()

    assert OLD in loaded(redis_client)
    until = redis_client.zscore(KEYS.libraries, OLD)
    assert until is not None
    assert until > (time.time() + 23 * 3600) * 1000


async def test_a_scheduler_that_may_not_delete_says_so_once_and_leaves_it(
    redis_url: str, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    announce(redis_client, OLD, -HOUR_MS)
    redis_client.acl_setuser(
        "careful", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-function|delete"]
    )
    try:
        url = redis_url.replace("unix://", "unix://careful:any@")
        async with connect_async(url, retries=0) as connection:
            with caplog.at_level(logging.WARNING):
                await asyncio.wait_for(Libraries(connection, KEYS).run(), 30)
    finally:
        redis_client.acl_deluser("careful")

    assert OLD in loaded(redis_client)
    assert [r.message for r in caplog.records if OLD in r.message] == [
        f"the library {OLD} is not used any more; delete it as a deployer"
    ]
