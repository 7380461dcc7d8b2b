"""One attempt after the other, to real receivers."""

import asyncio
import json
import threading
from dataclasses import replace
from email.utils import formatdate

import pytest
import redis
import redis.asyncio
import standardwebhooks
import svix.webhooks

import openai
from support import shard
from support.deliveries import SETTINGS, end_job, make_due, post, view
from support.hook_sink import Answer, HookSink
from support.shard import KEYS
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.breaker import FAILURES_TO_OPEN
from tidemill_webhooks.delivery import Deliverer


async def test_a_delivery_is_signed_with_the_endpoints_secret(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    endpoint = admin.add(sink.url, allow_private=True)
    job_id = end_job(redis_client)
    delivery = await post(client, admin)
    assert await deliverer.attempt(delivery.delivery_id) == "delivered"
    [request] = sink.received
    secret, headers = endpoint.secrets[0].value, dict(request.headers)
    payload = standardwebhooks.Webhook(secret).verify(request.body, headers)
    assert payload["data"] == {"id": job_id} and payload["id"] == request.headers["webhook-id"]
    svix.webhooks.Webhook(secret).verify(request.body, headers)
    event = openai.OpenAI(api_key="none").webhooks.unwrap(request.body, headers, secret=secret)
    assert (event.type, event.data.id) == ("response.completed", job_id)
    assert request.path == "/hooks?a=1"
    assert request.headers["host"] == f"localhost:{sink.port}"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("Tidemill-Webhooks/")
    [attempt] = view(admin, delivery).attempts
    assert (attempt.number, attempt.status, attempt.error) == (1, 204, "")


async def test_what_ended_is_not_delivered_again(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    assert await deliverer.attempt(delivery.delivery_id) == "delivered"
    assert await deliverer.attempt(delivery.delivery_id) == "ended"
    assert await deliverer.attempt("evt_none-we_none") == "gone"
    assert len(sink.received) == 1 and redis_client.zcard(KEYS.due_deliveries) == 0


async def test_a_failure_is_tried_again_later_with_the_same_id_and_body_and_a_new_time(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    sink.answer = lambda _: Answer(500 if len(sink.received) == 1 else 200)
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    assert await deliverer.attempt(delivery.delivery_id) == "pending"
    assert await deliverer.attempt(delivery.delivery_id) == "early"
    now = shard.server_ms(redis_client)
    due = redis_client.zscore(KEYS.due_deliveries, delivery.delivery_id)
    assert now + 3_000 < due <= now + 5_600
    make_due(redis_client, delivery.delivery_id)
    assert await deliverer.attempt(delivery.delivery_id) == "delivered"
    first, second = sink.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    assert [attempt.status for attempt in view(admin, delivery).attempts] == [500, 200]


async def test_ten_failures_end_a_delivery_and_a_replay_begins_it_again(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    sink.answer = lambda _: Answer(404)
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    states = []
    for _ in range(10):
        make_due(redis_client, delivery.delivery_id)
        for key in redis_client.scan_iter(KEYS.circuit("*")):
            redis_client.hset(key, "o", 1)
        states.append(await deliverer.attempt(delivery.delivery_id))
    assert states == ["pending"] * 9 + ["failed"]
    sink.answer = lambda _: Answer(200)
    assert admin.replay(delivery.delivery_id)
    for key in redis_client.scan_iter(KEYS.circuit("*")):
        redis_client.hset(key, "o", 1)
    assert await deliverer.attempt(delivery.delivery_id) == "delivered"
    assert len(set(sink.ids)) == 1 and len(sink.received) == 11


async def test_gone_switches_the_endpoint_off(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    sink.answer = lambda _: Answer(410)
    endpoint = admin.add(sink.url, allow_private=True)
    end_job(redis_client)
    delivery = await post(client, admin)
    assert await deliverer.attempt(delivery.delivery_id) == "failed"
    assert admin.hooks().endpoint(endpoint.endpoint_id).off_reason == "it answered 410 Gone"
    end_job(redis_client)
    assert redis_client.xlen(KEYS.outbox) == 0


@pytest.mark.parametrize("change", ["switch", "remove"])
async def test_what_is_on_its_way_to_an_endpoint_that_went_is_given_up(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
    change: str,
) -> None:
    endpoint = admin.add(sink.url, allow_private=True).endpoint_id
    end_job(redis_client)
    delivery = await post(client, admin)
    admin.switch(endpoint, "pause") if change == "switch" else admin.remove(endpoint)
    assert await deliverer.attempt(delivery.delivery_id) == "failed"
    assert not sink.received
    [attempt] = view(admin, delivery).attempts
    assert attempt.error == (
        "the endpoint is off: pause" if change == "switch" else "the endpoint was removed"
    )


@pytest.mark.parametrize("is_date", [False, True])
async def test_a_receiver_is_left_alone_as_long_as_it_asks(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
    is_date: bool,
) -> None:
    now = shard.server_ms(redis_client)
    asked = formatdate(now / 1000 + 900, usegmt=True) if is_date else "900"
    sink.answer = lambda _: Answer(429, {"Retry-After": asked})
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    await deliverer.attempt(delivery.delivery_id)
    due = redis_client.zscore(KEYS.due_deliveries, delivery.delivery_id)
    assert now + 890_000 < due < now + 960_000
    end_job(redis_client, sink.url)
    other = await post(client, admin)
    assert await deliverer.attempt(other.delivery_id) == "open"
    assert redis_client.zscore(KEYS.due_deliveries, other.delivery_id) > now + 890_000


@pytest.mark.parametrize("status", [204, 500])
async def test_what_was_in_the_air_already_does_not_end_a_pause_that_was_asked_for(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
    status: int,
) -> None:
    hold = threading.Event()
    sink.answer = lambda _: Answer(status, hold=hold)
    end_job(redis_client, sink.url)
    slow = asyncio.create_task(deliverer.attempt((await post(client, admin)).delivery_id))
    while not sink.received:
        await asyncio.sleep(0.01)
    sink.answer = lambda _: Answer(429, {"Retry-After": "900"})
    end_job(redis_client, sink.url)
    assert await deliverer.attempt((await post(client, admin)).delivery_id) == "pending"
    hold.set()
    assert await slow == ("delivered" if status == 204 else "pending")
    end_job(redis_client, sink.url)
    assert await deliverer.attempt((await post(client, admin)).delivery_id) == "open"


async def test_the_longer_of_two_pauses_holds_and_an_answer_after_it_ends_it(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    now = shard.server_ms(redis_client)
    hold = threading.Event()
    sink.answer = lambda _: Answer(429, {"Retry-After": "5"}, hold=hold)
    end_job(redis_client, sink.url)
    slow = asyncio.create_task(deliverer.attempt((await post(client, admin)).delivery_id))
    while not sink.received:
        await asyncio.sleep(0.01)
    sink.answer = lambda _: Answer(503, {"Retry-After": "900"})
    end_job(redis_client, sink.url)
    await deliverer.attempt((await post(client, admin)).delivery_id)
    hold.set()
    assert await slow == "pending"
    [circuit] = redis_client.scan_iter(KEYS.circuit("*"))
    assert float(redis_client.hget(circuit, "o")) >= now + 900_000

    redis_client.hset(circuit, "o", 1)
    sink.answer = lambda _: Answer(204)
    end_job(redis_client, sink.url)
    assert await deliverer.attempt((await post(client, admin)).delivery_id) == "delivered"
    assert not redis_client.exists(circuit)


async def test_a_circuit_opens_and_one_delivery_goes_first_when_it_is_over(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    sink.answer = lambda _: Answer(500)
    deliveries = []
    for _ in range(FAILURES_TO_OPEN + 2):
        end_job(redis_client, sink.url)
        deliveries.append((await post(client, admin)).delivery_id)
    states = [await deliverer.attempt(delivery) for delivery in deliveries]
    assert states == ["pending"] * FAILURES_TO_OPEN + ["open"] * 2
    [circuit] = redis_client.scan_iter(KEYS.circuit("*"))
    redis_client.hset(circuit, "o", 1)

    hold = threading.Event()
    sink.answer = lambda _: Answer(200, hold=hold)
    probe = asyncio.create_task(deliverer.attempt(deliveries[-2]))
    while len(sink.received) == FAILURES_TO_OPEN:
        await asyncio.sleep(0.01)
    assert await deliverer.attempt(deliveries[-1]) == "open"
    hold.set()
    assert await probe == "delivered"
    assert await deliverer.attempt(deliveries[-1]) == "delivered"
    assert not redis_client.exists(circuit)


async def test_a_tenant_has_a_bounded_number_of_attempts_at_once(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin, sink: HookSink
) -> None:
    hold = threading.Event()
    sink.answer = lambda _: Answer(hold=hold)
    deliverer = Deliverer(client, KEYS, replace(SETTINGS, max_in_flight=2))
    deliveries = []
    for _ in range(3):
        end_job(redis_client, sink.url)
        deliveries.append((await post(client, admin)).delivery_id)
    running = [asyncio.create_task(deliverer.attempt(one)) for one in deliveries[:2]]
    while len(sink.received) < 2:
        await asyncio.sleep(0.01)
    assert await deliverer.attempt(deliveries[2]) == "crowded"
    hold.set()
    assert await asyncio.gather(*running) == ["delivered"] * 2
    assert await deliverer.attempt(deliveries[2]) == "delivered"


async def test_an_attempt_that_lost_its_lease_cannot_say_how_it_went(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin, sink: HookSink
) -> None:
    hold = threading.Event()
    sink.answer = lambda _: Answer(500, hold=hold) if len(sink.received) == 1 else Answer(200)
    deliverer = Deliverer(client, KEYS, SETTINGS)
    end_job(redis_client, sink.url)
    delivery = (await post(client, admin)).delivery_id
    slow = asyncio.create_task(deliverer.attempt(delivery))
    while not sink.received:
        await asyncio.sleep(0.01)
    assert await deliverer.attempt(delivery) == "taken"
    redis_client.hset(KEYS.delivery(delivery), "ln", 1)
    assert await deliverer.attempt(delivery) == "delivered"
    hold.set()
    assert await slow == ""
    found = admin.delivery(delivery)
    assert found is not None and found.state == "delivered"
    assert [attempt.number for attempt in found.attempts] == [2]


async def test_an_old_delivery_is_given_up(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    redis_client.hset(KEYS.delivery(delivery.delivery_id), "ex", 1)
    assert await deliverer.attempt(delivery.delivery_id) == "old"
    assert view(admin, delivery).state == "failed" and not sink.received


async def test_callbacks_are_signed_by_the_tenants_secret_else_the_operators_else_a_new_one(
    redis_client: redis.Redis, client: redis.asyncio.Redis, admin: HookAdmin, sink: HookSink
) -> None:
    operators = "whsec_" + "b3BlcmF0b3I" * 4
    for settings in (replace(SETTINGS, operator_secret=operators), SETTINGS, SETTINGS):
        end_job(redis_client, sink.url)
        delivery = await post(client, admin)
        assert await Deliverer(client, KEYS, settings).attempt(delivery.delivery_id) == "delivered"
    made = admin.callback_secret()
    assert made is not None
    for secret, request in zip((operators, made, made), sink.received, strict=True):
        standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))
    chosen = admin.rotate_callback_secret()
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    with_both = Deliverer(client, KEYS, replace(SETTINGS, operator_secret=operators))
    assert await with_both.attempt(delivery.delivery_id) == "delivered"
    for secret in (chosen, made):
        request = sink.received[-1]
        standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))


async def test_a_note_tells_status_and_time_alone(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    end_job(redis_client, sink.url)
    delivery = await post(client, admin)
    await deliverer.attempt(delivery.delivery_id)
    note = json.loads(redis_client.hget(KEYS.delivery(delivery.delivery_id), "a1"))
    assert note.keys() == {"t", "ms", "status", "error"}
