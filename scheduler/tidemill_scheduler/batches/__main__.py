"""``python -m tidemill_scheduler.batches``: works on the batches of one shard while there are any.

Address and shard come from ``TIDEMILL_REDIS_URL`` and ``TIDEMILL_SHARD``.  The leading scheduler
starts it; another one that runs beside it works on other batches.
"""

import asyncio
import sys
from collections.abc import Sequence

from tidemill.protocol.errors import ConfigError, TidemillError
from tidemill.protocol.keys import ShardKeys
from tidemill.service.blobs.store import BlobStore
from tidemill.service.config import ServiceConfig, load_config
from tidemill.service.log import setup_logging
from tidemill.service.runtime import Drain, exit_with_parent
from tidemill_scheduler.batches.runner import BatchRunner
from tidemill_scheduler.batches.settings import RunnerSettings, parse_settings
from tidemill_scheduler.tasks import end_tasks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until there is nothing to do or SIGTERM; returns the exit status."""
    exit_with_parent()
    try:
        config, settings = load_config(), parse_settings(arguments)
        setup_logging(config.log_level, "batches")
        with Drain() as drain:
            asyncio.run(_serve(config, settings, drain))
    except TidemillError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _serve(config: ServiceConfig, settings: RunnerSettings, drain: Drain) -> None:
    if config.redis_url is None:
        raise ConfigError("the batch runner was given no broker", fix="Set TIDEMILL_REDIS_URL.")
    runner = BatchRunner(
        config.redis_url,
        ShardKeys(config.shard),
        BlobStore(config.blob_url),
        settings,
    )
    work = asyncio.create_task(runner.run())
    stop = asyncio.create_task(drain.draining.wait_async())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([work, stop])
    if not work.cancelled():
        work.result()


if __name__ == "__main__":
    sys.exit(main())
