"""The leader's part: everything due is begun, by a queue where somebody works it off."""

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
import redis
import redis.asyncio

from support import shard
from support.hook_sink import Answer, HookSink
from support.shard import KEYS
from support.wait import wait_until_async
from tidemill.protocol.calls import webhooks as calls
from tidemill.protocol.errors import BrokerUnavailable
from tidemill.protocol.functions import run
from tidemill.protocol.messages import JobTerms
from tidemill_scheduler.tasks import end_tasks
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.courier import MAX_HANDS, Courier
from tidemill_webhooks.delivery import Deliverer
from tidemill_webhooks.outbox import Outbox
from tidemill_webhooks.settings import DeliverySettings


def end_job(client: redis.Redis, callback_url: str) -> str:
    job_id = shard.submit(client, terms=JobTerms(callback_url=callback_url))
    shard.finish(client, job_id, shard.dispatch(client, job_id, shard.lead(client)).fence, 0)
    return job_id


@dataclass
class FakeQueue:
    """Remembers what was put into it."""

    is_away: bool = False
    taken: list[tuple[str, str, int, int]] = field(default_factory=list)

    def put(self, shard: str, delivery_id: str, attempts: int, hands: int) -> None:
        if self.is_away:
            raise BrokerUnavailable("the queue is away")
        self.taken.append((shard, delivery_id, attempts, hands))

    def close(self) -> None:
        self.taken.clear()


async def settle(courier: Courier) -> None:
    """Let it work until it has nothing to do and nothing runs."""
    while await courier.turn() or courier.num_running:
        await asyncio.sleep(0.01)


async def test_without_workers_of_the_queue_it_delivers_by_itself(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink, deliverer: Deliverer
) -> None:
    jobs = [end_job(redis_client, sink.url) for _ in range(5)]
    queue = FakeQueue()
    await settle(Courier(client, KEYS, deliverer, queue))
    assert sorted(sink.ids) == sorted(job.replace("job_", "evt_") for job in jobs)
    assert not queue.taken and redis_client.zcard(KEYS.due_deliveries) == 0


async def test_with_workers_each_attempt_is_left_to_the_queue_once(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink, deliverer: Deliverer
) -> None:
    run(redis_client, calls.serve_hooks(KEYS, worker_id="w", ttl_ms=60_000))
    job_id = end_job(redis_client, sink.url)
    queue = FakeQueue()
    courier = Courier(client, KEYS, deliverer, queue)
    await settle(courier)
    await settle(courier)
    delivery = f"{job_id.replace('job_', 'evt_')}-callback"
    assert queue.taken == [("00", delivery, 0, 0)] and not sink.received
    assert await deliverer.attempt(delivery) == "delivered"
    await settle(courier)
    assert len(queue.taken) == 1


async def test_what_the_queue_loses_is_put_back_and_then_delivered_here(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    sink: HookSink,
    deliverer: Deliverer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill_webhooks.courier.HAND_MS", 1)
    run(redis_client, calls.serve_hooks(KEYS, worker_id="w", ttl_ms=60_000))
    end_job(redis_client, sink.url)
    queue = FakeQueue()
    courier = Courier(client, KEYS, deliverer, queue)
    while not sink.received:
        await courier.turn()
        await asyncio.sleep(0.01)
    await settle(courier)
    assert [hands for *_, hands in queue.taken] == list(range(MAX_HANDS))
    assert len(sink.received) == 1


async def test_a_queue_that_is_away_holds_up_nothing(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink, deliverer: Deliverer
) -> None:
    run(redis_client, calls.serve_hooks(KEYS, worker_id="w", ttl_ms=60_000))
    end_job(redis_client, sink.url)
    await settle(Courier(client, KEYS, deliverer, FakeQueue(is_away=True)))
    assert len(sink.received) == 1


async def test_workers_that_said_goodbye_or_fell_silent_do_not_count(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink, deliverer: Deliverer
) -> None:
    run(redis_client, calls.serve_hooks(KEYS, worker_id="w", ttl_ms=60_000))
    assert run(redis_client, calls.serve_hooks(KEYS, worker_id="v", ttl_ms=60_000)) == 2
    run(redis_client, calls.serve_hooks(KEYS, worker_id="w", ttl_ms=0))
    redis_client.zadd(KEYS.hook_workers, {"v": 1})
    end_job(redis_client, sink.url)
    await settle(Courier(client, KEYS, deliverer, FakeQueue()))
    assert len(sink.received) == 1


async def test_an_attempt_that_died_with_its_process_is_made_again_when_its_lease_is_over(
    redis_client: redis.Redis,
    client: redis.asyncio.Redis,
    admin: HookAdmin,
    sink: HookSink,
    deliverer: Deliverer,
) -> None:
    sink.answer = lambda _: Answer(500)
    end_job(redis_client, sink.url)
    courier = Courier(client, KEYS, deliverer)
    while not sink.received:
        await courier.turn()
        await asyncio.sleep(0.01)
    await settle(courier)
    [delivery] = admin.deliveries()
    lease = {"ln": shard.server_ms(redis_client) + 300, "du": 1}
    redis_client.hset(KEYS.delivery(delivery.delivery_id), mapping=lease)
    redis_client.zadd(KEYS.due_deliveries, {delivery.delivery_id: lease["ln"]})
    work = asyncio.create_task(courier.run())
    await wait_until_async(lambda: len(sink.received) == 2)
    await end_tasks([work])
    assert shard.server_ms(redis_client) >= lease["ln"]


async def test_many_ends_at_once_are_all_delivered_once(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink, deliverer: Deliverer
) -> None:
    jobs = [end_job(redis_client, sink.url) for _ in range(60)]
    couriers = [asyncio.create_task(Courier(client, KEYS, deliverer).run()) for _ in range(2)]
    await wait_until_async(lambda: len(set(sink.ids)) == len(jobs))
    await wait_until_async(lambda: redis_client.zcard(KEYS.due_deliveries) == 0)
    await end_tasks(couriers)
    assert len(sink.ids) == len(jobs)
    assert redis_client.zcard(KEYS.deliveries_in_flight("default")) == 0


async def test_one_damaged_delivery_does_not_hold_up_the_others(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink, deliverer: Deliverer
) -> None:
    redis_client.set(KEYS.circuit("none"), "no hash", px=60_000)
    redis_client.hset(KEYS.delivery("odd"), mapping={"st": "pending", "du": 1, "ex": 10**15})
    redis_client.expire(KEYS.delivery("odd"), 60)
    redis_client.zadd(KEYS.due_deliveries, {"odd": 1})
    end_job(redis_client, sink.url)
    work = asyncio.create_task(Courier(client, KEYS, deliverer).run())
    await wait_until_async(lambda: len(sink.received) == 1)
    assert not work.done()
    await end_tasks([work])


async def test_attempts_that_died_hold_their_tenant_up_for_little_more_than_one_may_take(
    redis_client: redis.Redis, client: redis.asyncio.Redis, sink: HookSink
) -> None:
    settings = DeliverySettings(allow_private=True)
    for _ in range(settings.max_in_flight + 1):
        end_job(redis_client, sink.url)
    await Outbox(client, KEYS).work_off()
    *dying, waiting = [raw.decode() for raw in redis_client.zrange(KEYS.due_deliveries, 0, -1)]
    hold = threading.Event()
    sink.answer = lambda _: Answer(hold=hold)
    deliverer = Deliverer(client, KEYS, settings)
    attempts = [asyncio.create_task(deliverer.attempt(one)) for one in dying]
    while len(sink.received) < len(dying):
        await asyncio.sleep(0.01)
    # As a process that is killed leaves them.
    for attempt in attempts:
        attempt.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)
    hold.set()
    assert await deliverer.attempt(waiting) == "crowded"
    leases = redis_client.zrange(KEYS.deliveries_in_flight("default"), 0, -1, withscores=True)
    until_ms = max(until_ms for _, until_ms in leases)
    left_seconds = (until_ms - shard.server_ms(redis_client)) / 1000
    assert left_seconds <= settings.total_seconds + 5
    assert settings.lease_ms > settings.total_seconds * 1000
