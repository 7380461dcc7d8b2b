"""A store in a directory of the test, clients of it, and runners."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from support.batch_shop import FAST, StartRunner
from support.s3_server import s3_address as s3_address
from support.s3_server import s3_keys as s3_keys
from support.s3_server import s3_store as s3_store
from support.s3_server import s3_url as s3_url
from support.shard import KEYS
from tidemill.batches.client import AsyncBatches
from tidemill.service.blobs.store import BlobStore
from tidemill_scheduler.batches.runner import BatchRunner
from tidemill_scheduler.batches.settings import RunnerSettings
from tidemill_scheduler.tasks import end_tasks


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(str(tmp_path / "blobs"))


@pytest.fixture
async def client(
    redis_client: redis.Redis, redis_url: str, blobs: BlobStore
) -> AsyncIterator[AsyncBatches]:
    async with AsyncBatches(redis_url, blobs=blobs) as client:
        yield client


@pytest.fixture
def start_runner(redis_url: str, blobs: BlobStore) -> StartRunner:
    """Returns what runs a batch runner."""

    @asynccontextmanager
    async def start(**settings: object) -> AsyncIterator["asyncio.Task[None]"]:
        chosen = {name: getattr(FAST, name) for name in FAST.__dataclass_fields__} | settings
        runner = BatchRunner(redis_url, KEYS, blobs, RunnerSettings(**chosen))
        task = asyncio.create_task(runner.run())
        try:
            yield task
        finally:
            await end_tasks([task])

    return start
