"""Ends of jobs that become deliveries."""

import redis
import redis.asyncio

from support import shard
from support.shard import KEYS
from tidemill.protocol.messages import JobTerms
from tidemill_webhooks.admin import DeliveryView, HookAdmin
from tidemill_webhooks.outbox import Outbox
from tidemill_webhooks.settings import DeliverySettings

SETTINGS = DeliverySettings(allow_private=True)


def end_job(client: redis.Redis, callback_url: str = "") -> str:
    job_id = shard.submit(client, terms=JobTerms(callback_url=callback_url))
    shard.finish(client, job_id, shard.dispatch(client, job_id, shard.lead(client)).fence, 0)
    return job_id


def make_due(client: redis.Redis, delivery_id: str) -> None:
    """Let the pause be over."""
    client.hset(KEYS.delivery(delivery_id), "du", 1)


async def post(client: redis.asyncio.Redis, admin: HookAdmin) -> DeliveryView:
    """The delivery that the last end has become."""
    await Outbox(client, KEYS).work_off()
    return next(admin.deliveries())


def view(admin: HookAdmin, delivery: DeliveryView) -> DeliveryView:
    found = admin.delivery(delivery.delivery_id)
    assert found is not None
    return found
