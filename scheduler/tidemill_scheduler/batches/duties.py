"""What the leading scheduler does for files and batches."""

import logging
from collections.abc import Awaitable, Callable

import redis.asyncio

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.keys import ShardKeys
from tidemill.service.blobs.store import BlobStore
from tidemill_scheduler.batches.keeper import BatchKeeper
from tidemill_scheduler.batches.sweep import StoreSweep
from tidemill_scheduler.config import SchedulerConfig

_log = logging.getLogger(__name__)


def batch_duties(
    client: redis.asyncio.Redis, keys: ShardKeys, config: SchedulerConfig
) -> list[Callable[[], Awaitable[None]]]:
    """Return the duties; none, with a word in the log, without a blob store."""
    if not config.blob_url:
        return []
    try:
        blobs = BlobStore(config.blob_url)
    except ConfigError as error:
        _log.warning("no files and batches: %s", error.one_line())
        return []
    keeper = BatchKeeper(
        client,
        keys,
        url=config.redis_url,
        blob_url=config.blob_url,
        options=("--allow-private-webhooks",) if config.allow_private_webhooks else (),
    )
    return [keeper.run, StoreSweep(client, keys, blobs).run]
