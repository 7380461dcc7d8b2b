"""When a standby may think that the leader is gone."""

from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio

from support.shard import KEYS, lead
from tidemill.service.redis import connect_async
from tidemill_scheduler.presence import Presence, Witness


def test_a_leader_is_gone_once_it_was_heard_and_is_silent_twice() -> None:
    witness = Witness()

    assert [witness.saw("a", n) for n in (1, 0, 0, 0)] == [False, False, True, True]


def test_a_leader_that_nobody_heard_may_be_about_to_listen() -> None:
    witness = Witness()

    assert not any(witness.saw("a", 0) for _ in range(100))


def test_a_leader_that_listens_again_is_not_gone() -> None:
    witness = Witness()

    assert not any(witness.saw("a", n) for n in (1, 0, 1, 0, 1, 0))


def test_a_new_leader_is_not_judged_by_the_silence_after_the_old_one() -> None:
    witness = Witness()
    witness.saw("a", 1)
    witness.saw("a", 0)

    assert not any(witness.saw("b", 0) for _ in range(10))


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


async def test_the_lease_of_a_dead_leader_is_given_back(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    lead(redis_client, "sch_dead")
    presence = Presence(client, KEYS)
    bell = redis_client.pubsub()
    bell.ssubscribe(KEYS.bell)
    assert bell.get_message(timeout=30)
    await presence.check()
    bell.close()

    for _ in range(2):
        assert redis_client.get(KEYS.leader) == b"sch_dead"
        await presence.check()

    assert not redis_client.exists(KEYS.leader)


async def test_a_user_who_may_not_ask_leaves_it_to_the_lease(
    redis_url: str, redis_client: redis.Redis
) -> None:
    lead(redis_client)
    redis_client.acl_setuser(
        "deaf", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-pubsub"]
    )
    try:
        url = redis_url.replace("unix://", "unix://deaf:any@")
        async with connect_async(url, retries=0) as connection:
            for _ in range(3):
                await Presence(connection, KEYS).check()
    finally:
        redis_client.acl_deluser("deaf")

    assert redis_client.exists(KEYS.leader)
