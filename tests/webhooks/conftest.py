"""A shard with receivers of its webhooks."""

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest
import redis
import redis.asyncio

from support.hook_sink import HookSink, hook_sink
from support.shard import KEYS
from support.tls import Authority, make_authority
from tidemill._link import Link
from tidemill.service.redis import connect_async
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.delivery import Deliverer
from tidemill_webhooks.settings import DeliverySettings


@pytest.fixture
def sink() -> Iterator[HookSink]:
    """A receiver that takes everything, over http."""
    with hook_sink() as sink:
        yield sink


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who certifies that a receiver is ``localhost``."""
    return make_authority(tmp_path_factory.mktemp("hooks") / "tls")


@pytest.fixture
def admin(redis_client: redis.Redis, redis_url: str) -> Iterator[HookAdmin]:
    """The webhooks of the tenant ``default``."""
    with closing(Link(redis_url, KEYS.shard, 10.0)) as link:
        yield HookAdmin(link, KEYS, "default")


@pytest.fixture
async def client(redis_client: redis.Redis, redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """An asynchronous client of the shard."""
    client = connect_async(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def deliverer(client: redis.asyncio.Redis) -> Deliverer:
    """Delivers to receivers on this machine."""
    return Deliverer(client, KEYS, DeliverySettings(allow_private=True))
