"""A store in a directory of the test, and clients of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

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
