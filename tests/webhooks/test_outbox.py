"""From the end of a job to deliveries."""

import asyncio
import json
from collections.abc import Callable

import pytest
import redis
import redis.asyncio

from support import shard
from support.shard import KEYS
from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.messages import JobTerms
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.endpoints import Endpoint
from tidemill_webhooks.events import Event
from tidemill_webhooks.outbox import Outbox, callback_circuit, postings

CALLBACK = JobTerms(callback_url="https://example.com/done")
URL = "https://example.com/hooks"


def finish(client: redis.Redis, job_id: str) -> None:
    shard.finish(client, job_id, shard.dispatch(client, job_id, shard.lead(client)).fence, 0)


def retry_to_death(client: redis.Redis, job_id: str) -> None:
    fence = shard.dispatch(client, job_id, shard.lead(client)).fence
    assert shard.nack(client, job_id, fence) == calls.NackOutcome.DEAD


def crash_to_death(client: redis.Redis, job_id: str) -> None:
    for _ in range(calls.MAX_CRASHES):
        fence = shard.dispatch(client, job_id, shard.lead(client)).fence
        shard.claim(client, job_id, fence)
        shard.expire_lease(client, job_id)
        shard.reap(client, job_id)


def let_expire(client: redis.Redis, job_id: str) -> None:
    client.hset(KEYS.job(job_id), "dl", 1)
    client.zadd(KEYS.due, {job_id: 1})
    assert shard.expire(client, job_id) == "deadline"


def refuse(client: redis.Redis, job_id: str) -> None:
    end = shard.CANCELLED.model_copy(update={"state": "failed", "finish_reason": "error"})
    ref = shard.ref_of(client, job_id)
    run(client, calls.refuse(KEYS, ref, epoch=shard.lead(client), end=end))


def miss_the_deadline_by_a_retry(client: redis.Redis, job_id: str) -> None:
    fence = shard.dispatch(client, job_id, shard.lead(client)).fence
    client.hset(KEYS.job(job_id), mapping={"dl": shard.server_ms(client) + 1000, "mx": 3})
    pause = calls.RetryPause(base_ms=60_000)
    assert shard.nack(client, job_id, fence, pause=pause) == calls.NackOutcome.EXPIRED


ENDS: list[tuple[Callable[[redis.Redis, str], object], str]] = [
    (finish, "done"),
    (shard.cancel, "cancelled"),
    (refuse, "failed"),
    (let_expire, "expired"),
    (miss_the_deadline_by_a_retry, "expired"),
    (retry_to_death, "dead"),
    (crash_to_death, "dead"),
]


def outbox(client: redis.Redis) -> list[dict[str, str]]:
    return [
        {name.decode(): value.decode() for name, value in fields.items()}
        for _, fields in client.xrange(KEYS.outbox)
    ]


@pytest.mark.parametrize(
    ("end", "state"), ENDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_end_of_a_job_with_a_callback_is_told_once(
    redis_client: redis.Redis, end: Callable[[redis.Redis, str], object], state: str
) -> None:
    terms = CALLBACK.model_copy(update={"max_retries": 0, "deadline_ms": 60_000})
    job_id = shard.submit(redis_client, terms=terms)
    end(redis_client, job_id)
    shard.cancel(redis_client, job_id)
    [entry] = outbox(redis_client)
    assert (entry["j"], entry["s"], entry["tn"]) == (job_id, state, "default")
    assert entry["u"] == CALLBACK.callback_url
    assert entry["t"] == redis_client.hget(KEYS.job(job_id), "te").decode()


def test_without_callback_and_endpoint_nothing_is_told(redis_client: redis.Redis) -> None:
    finish(redis_client, shard.submit(redis_client))
    assert not redis_client.exists(KEYS.outbox)


def test_with_an_endpoint_that_is_on_ends_are_told(
    redis_client: redis.Redis, admin: HookAdmin
) -> None:
    endpoint = admin.add(URL).endpoint_id
    job_id = shard.submit(redis_client)
    finish(redis_client, job_id)
    admin.switch(endpoint, "enough")
    finish(redis_client, shard.submit(redis_client))
    admin.switch(endpoint, "")
    last = shard.submit(redis_client)
    finish(redis_client, last)
    admin.remove(endpoint)
    finish(redis_client, shard.submit(redis_client))
    assert [entry["j"] for entry in outbox(redis_client)] == [job_id, last]
    assert not redis_client.exists(KEYS.hooks("default"))


def test_lines_of_a_batch_object_are_not_told_but_those_of_a_named_group_are(
    redis_client: redis.Redis, admin: HookAdmin
) -> None:
    admin.add(URL)
    line = shard.submit(redis_client, terms=JobTerms(batch="batch_1"), idempotency_key="batch_1:7")
    member = shard.submit(redis_client, terms=JobTerms(batch="mine"), idempotency_key="k")
    for job_id in (line, member):
        finish(redis_client, job_id)
    assert [entry["j"] for entry in outbox(redis_client)] == [member]


async def test_an_entry_becomes_one_delivery_for_each_place_and_leaves(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin
) -> None:
    wanted, other = admin.add(URL, events=["response.*"]), admin.add(URL, events=["batch.*"])
    off = admin.add(URL)
    admin.switch(off.endpoint_id, "off")
    job_id = shard.submit(redis_client, terms=CALLBACK)
    finish(redis_client, job_id)
    assert await Outbox(client, KEYS).work_off() == 1
    views = {view.endpoint_id: view for view in admin.deliveries()}
    assert views.keys() == {wanted.endpoint_id, "callback"} and other.endpoint_id not in views
    for view in views.values():
        assert (view.state, view.event_type, view.about) == (
            "pending",
            "response.completed",
            job_id,
        )
        assert redis_client.zscore(KEYS.due_deliveries, view.delivery_id) is not None
    assert views["callback"].url == CALLBACK.callback_url
    assert redis_client.xlen(KEYS.outbox) == 0 and await Outbox(client, KEYS).work_off() == 0


async def test_of_a_line_of_a_batch_only_its_callback_is_told(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin
) -> None:
    admin.add(URL)
    terms = JobTerms(batch="b", callback_url=CALLBACK.callback_url, metadata={"row": "1"})
    job_id = shard.submit(redis_client, terms=terms, idempotency_key="b:1")
    finish(redis_client, job_id)
    await Outbox(client, KEYS).work_off()
    [view] = admin.deliveries()
    assert (view.endpoint_id, view.about) == ("callback", job_id)
    body = json.loads(redis_client.hget(KEYS.delivery(view.delivery_id), "bd") or b"")
    assert body["data"] == {"id": job_id, "metadata": {"row": "1"}}


async def test_any_number_of_readers_make_each_delivery_once(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin
) -> None:
    for _ in range(20):
        finish(redis_client, shard.submit(redis_client, terms=CALLBACK))
    await asyncio.gather(*(Outbox(client, KEYS).work_off() for _ in range(5)))
    views = list(admin.deliveries(limit=100))
    assert len(views) == len({view.about for view in views}) == 20


async def test_an_entry_that_says_nothing_leaves_and_holds_up_nobody(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin
) -> None:
    redis_client.xadd(KEYS.outbox, {"odd": b"\xff"})
    finish(redis_client, shard.submit(redis_client, terms=CALLBACK))
    assert await Outbox(client, KEYS).work_off() == 2
    assert len(list(admin.deliveries())) == 1 and redis_client.xlen(KEYS.outbox) == 0


def test_a_test_event_goes_to_its_endpoint_alone() -> None:
    endpoints = [
        Endpoint("we_a", URL, (), ("batch.*",), off_reason="off"),
        Endpoint("we_b", URL, ()),
    ]
    event = Event("evt_1", "tidemill.test", "we_a", "default", 1, only_endpoint="we_a")
    assert [place.delivery_id for place in postings(event, endpoints)] == ["evt_1-we_a"]


def test_callbacks_fail_together_by_tenant_host_and_port() -> None:
    first = callback_circuit("a", "https://example.com/x")
    assert first == callback_circuit("a", "https://EXAMPLE.com:443/y?z")
    assert first != callback_circuit("b", "https://example.com/x")
    assert first != callback_circuit("a", "https://example.com:8443/x")


async def test_the_log_of_a_tenant_is_bounded(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill.protocol.calls.webhooks.DELIVERY_LOG_SIZE", 3)
    for _ in range(5):
        finish(redis_client, shard.submit(redis_client, terms=CALLBACK))
    await Outbox(client, KEYS).work_off()
    assert redis_client.zcard(KEYS.delivery_log("default")) == 3
    assert redis_client.zcard(KEYS.due_deliveries) == 5


async def test_the_body_is_stored_so_that_every_try_sends_the_same(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin
) -> None:
    job_id = shard.submit(redis_client, terms=CALLBACK)
    finish(redis_client, job_id)
    await Outbox(client, KEYS).work_off()
    [view] = admin.deliveries()
    body = redis_client.hget(KEYS.delivery(view.delivery_id), "bd")
    assert json.loads(body)["data"] == {"id": job_id}
