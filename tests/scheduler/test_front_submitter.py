"""Entries that cannot become jobs at once."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis
import redis.asyncio

from support.puppet_worker import PuppetWorker
from support.shard import KEYS, cancel, lead
from tidemill.protocol import calls
from tidemill.protocol.calls import Submitted
from tidemill.protocol.errors import InvalidRequest, StaleEpoch, UnknownModel
from tidemill.protocol.functions import run_async
from tidemill.service.redis import connect_async
from tidemill_scheduler.intake.front_entry import FrontEntry, parse_entry
from tidemill_scheduler.intake.front_outcome import Delay, Outcome
from tidemill_scheduler.intake.front_submitter import FrontSubmitter


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


def entry(age_seconds: float = 0.0, **request: object) -> FrontEntry:
    """An entry written so many seconds ago."""
    body = {"request": {"prompt_ids": [1, 2, 3], **request}}
    entry_id = f"{round((time.time() - age_seconds) * 1000)}-0"
    return parse_entry(entry_id, {b"v": b"1", b"body": json.dumps(body).encode()})


async def put(client: redis.asyncio.Redis, given: FrontEntry) -> None:
    """Let an entry be at the front door."""
    if not await client.xrange(KEYS.front_door, given.entry_id, given.entry_id):
        await client.delete(KEYS.front_door)
        await client.xadd(KEYS.front_door, {"v": "1"}, id=given.entry_id)


async def submit_one(
    client: redis.asyncio.Redis, given: FrontEntry, *served: str, patience: float = 30.0
) -> Outcome:
    epoch = await run_async(client, calls.lead(KEYS, scheduler_id="sch_test", lease_ms=60_000))
    await put(client, given)
    submitter = FrontSubmitter(client, KEYS, lambda: served, patience, epoch=epoch)
    outcomes = await submitter.submit([given])
    assert list(outcomes) == [given.entry_id]
    return outcomes[given.entry_id]


@pytest.mark.parametrize("model", [{}, {"model": "absent"}])
async def test_a_model_is_waited_for_before_its_entries_are_refused(
    client: redis.asyncio.Redis, redis_client: redis.Redis, model: dict[str, str]
) -> None:
    young, old = entry(**model), entry(age_seconds=60, **model)

    assert isinstance(await submit_one(client, young), Delay)
    assert isinstance(await submit_one(client, old), UnknownModel)


async def test_the_only_model_whose_workers_live_goes_before_those_known(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    for name in ("lives", "gone"):
        PuppetWorker(redis_client, model=name)

    refused = await submit_one(client, entry())
    accepted = await submit_one(client, entry(), "lives")

    assert isinstance(refused, InvalidRequest)
    assert refused.message == "request.model: several are served: gone, lives"
    assert isinstance(accepted, Submitted)
    assert redis_client.hget(KEYS.job(accepted.job_id), "md") == b"lives"
    cancel(redis_client, accepted.job_id)


@pytest.fixture
def full_memory(redis_client: redis.Redis) -> Iterator[Callable[[], None]]:
    """Lets the server refuse whatever needs more memory."""
    yield lambda: redis_client.config_set("maxmemory", 1)
    redis_client.config_set("maxmemory", 0)


async def test_an_entry_waits_while_the_servers_memory_is_full(
    client: redis.asyncio.Redis,
    redis_client: redis.Redis,
    full_memory: Callable[[], None],
) -> None:
    PuppetWorker(redis_client)
    await put(client, given := entry(tenant="new"))
    full_memory()
    assert isinstance(await submit_one(client, given, "m"), Delay)

    redis_client.config_set("maxmemory", 0)

    accepted = await submit_one(client, given, "m")
    assert isinstance(accepted, Submitted)
    cancel(redis_client, accepted.job_id)


async def test_an_entry_that_was_answered_meanwhile_becomes_no_job(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    PuppetWorker(redis_client)
    submitter = FrontSubmitter(client, KEYS, lambda: ["m"], 30.0, epoch=lead(redis_client))

    outcomes = await submitter.submit([given := entry()])

    assert outcomes == {given.entry_id: None}
    assert not list(redis_client.scan_iter(KEYS.job("*")))


async def test_a_leader_whose_epoch_is_over_submits_nothing(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    PuppetWorker(redis_client)
    submitter = FrontSubmitter(client, KEYS, lambda: ["m"], 30.0, epoch=lead(redis_client))
    await put(client, given := entry())
    redis_client.delete(KEYS.leader)
    lead(redis_client, "sch_other")

    with pytest.raises(StaleEpoch):
        await submitter.submit([given])

    assert not list(redis_client.scan_iter(KEYS.job("*")))
