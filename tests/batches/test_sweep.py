"""The leader's sweep of the blob store."""

import os
from pathlib import Path

import pytest
import redis
import redis.asyncio

from support.batch_shop import create, request_line, upload
from support.shard import KEYS
from tidemill.batches.client import AsyncBatches
from tidemill.protocol.files import file_blob, part_blobs
from tidemill.service.blobs.store import BlobStore
from tidemill.service.redis import connect_async
from tidemill_scheduler.batches.sweep import StoreSweep


@pytest.fixture
async def sweep(redis_client: redis.Redis, redis_url: str, blobs: BlobStore):  # type: ignore[no-untyped-def]
    async with connect_async(redis_url) as client:
        yield StoreSweep(client, KEYS, blobs)


def names(blobs: BlobStore) -> list[str]:
    return [blob.name for blob in blobs.list() if not blob.name.endswith("/owner")]


def put(blobs: BlobStore, name: str, directory: Path | None = None) -> None:
    with blobs.writer(name) as writer:
        writer.write(b"x")
        writer.commit()
    if directory is not None:
        os.utime(directory / name, (0, 0))


async def test_a_deleted_file_goes_from_the_store_and_from_the_index(
    client: AsyncBatches, redis_client: redis.Redis, blobs: BlobStore, sweep: StoreSweep
) -> None:
    kept, deleted = await upload(client, b"a"), await upload(client, b"b")
    await client.delete_file(deleted.file_id)
    assert await sweep.forget_due() == 1
    assert names(blobs) == [file_blob(KEYS, "default", kept.file_id)]
    assert redis_client.zcard(KEYS.stored_until) == 1
    assert await sweep.forget_due() == 0


async def test_an_expired_file_goes_although_its_hash_has_gone_before(
    client: AsyncBatches, redis_client: redis.Redis, blobs: BlobStore, sweep: StoreSweep
) -> None:
    file = await upload(client, b"a")
    redis_client.delete(KEYS.file("default", file.file_id))
    redis_client.zadd(KEYS.stored_until, {f"file default {file.file_id}": 1})
    assert not (await client.files()).items
    assert await sweep.forget_due() == 1
    assert not names(blobs) and not redis_client.exists(KEYS.files("default"))


async def test_the_input_of_a_batch_stays_as_long_as_the_batch_may_read_it(
    client: AsyncBatches, blobs: BlobStore, sweep: StoreSweep
) -> None:
    batch = await create(client, [request_line(1)])
    await client.delete_file(batch.input_file_id)
    assert await sweep.forget_due() == 0
    assert len(names(blobs)) == 1


async def test_a_batch_whose_time_is_over_is_forgotten_with_what_is_left_of_its_parts(
    client: AsyncBatches, redis_client: redis.Redis, blobs: BlobStore, sweep: StoreSweep
) -> None:
    batch = await create(client, [request_line(1)])
    put(blobs, f"{part_blobs(KEYS, 'default', batch.batch_id)}/000000.out")
    redis_client.zadd(KEYS.stored_until, {f"batch default {batch.batch_id}": 1})
    assert await sweep.forget_due() == 1
    assert not [name for name in names(blobs) if "parts" in name]
    assert not (await client.batches()).items


async def test_only_old_blobs_that_nobody_knows_are_orphans(
    client: AsyncBatches, blobs: BlobStore, sweep: StoreSweep, tmp_path: Path
) -> None:
    directory = tmp_path / "blobs"
    assert await sweep.delete_orphans() == 0
    file, batch = await upload(client, b"a"), await create(client, [request_line(1)])
    known = [
        file_blob(KEYS, "default", file.file_id),
        f"{part_blobs(KEYS, 'default', batch.batch_id)}/000000.out",
    ]
    put(blobs, known[1])
    orphans = [
        "00/files/t-default/file-0",
        "00/parts/t-default/batch_0/000000.out",
        known[0] + ".x.part",
    ]
    for name in orphans:
        put(blobs, name, directory)
    for name in known:
        os.utime(directory / name, (0, 0))
    put(blobs, "00/files/t-default/file-young")
    put(blobs, "01/files/t-default/file-of-another-shard", directory)
    before = names(blobs)
    assert await sweep.delete_orphans() == 3
    assert sorted(set(before) - set(names(blobs))) == sorted(orphans)


async def test_nothing_is_an_orphan_in_the_store_of_another_broker(
    redis_client: redis.Redis, blobs: BlobStore, sweep: StoreSweep, tmp_path: Path
) -> None:
    put(blobs, "00/owner")
    put(blobs, "00/files/t-default/file-0", tmp_path / "blobs")
    assert await sweep.delete_orphans() == 0
    assert names(blobs) == ["00/files/t-default/file-0"]
    blobs.delete("00/owner")
    assert await sweep.delete_orphans() == 0
    assert names(blobs) == ["00/files/t-default/file-0"]


async def test_what_is_neither_file_nor_batch_leaves_the_index_and_takes_no_blob_along(
    client: AsyncBatches, redis_client: redis.Redis, blobs: BlobStore, sweep: StoreSweep
) -> None:
    await upload(client, b"a")
    for member in ("file", "file t ..", "file t a/../b", "file  ", "other t id", b"\xff"):
        redis_client.zadd(KEYS.stored_until, {member: 1})
    await sweep.forget_due()
    assert redis_client.zcard(KEYS.stored_until) == 1 and len(names(blobs)) == 1
