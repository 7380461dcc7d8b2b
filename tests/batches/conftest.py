"""A store in a directory of the test, and clients of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from support.s3_server import s3_address as s3_address
from support.s3_server import s3_keys as s3_keys
from support.s3_server import s3_store as s3_store
from support.s3_server import s3_url as s3_url
from tidemill.batches.client import AsyncBatches
from tidemill.service.blobs.store import BlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(str(tmp_path / "blobs"))


@pytest.fixture
async def client(
    redis_client: redis.Redis, redis_url: str, blobs: BlobStore
) -> AsyncIterator[AsyncBatches]:
    async with AsyncBatches(redis_url, blobs=blobs) as client:
        yield client
