"""Files: stored as they come, listed, read, deleted, expired."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from support.shard import KEYS
from tidemill.batches import transfer
from tidemill.batches.client import AsyncBatches
from tidemill.batches.transfer import beside_loop
from tidemill.protocol.batches import Batch
from tidemill.protocol.errors import (
    IdempotencyConflict,
    InvalidRequest,
    NoSuchObject,
    RequestTooLarge,
)
from tidemill.protocol.files import MAX_BATCH_INPUT_BYTES, StoredFile, file_blob
from tidemill.protocol.ids import new_batch_id, new_file_id
from tidemill.service.blobs.store import BlobStore


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def put(client: AsyncBatches, data: bytes = b"x", **options: object) -> StoredFile:
    given = {"filename": "in.jsonl", "purpose": "batch", **options}
    return await client.create_file(pieces(data), **given)  # type: ignore[arg-type]


async def test_a_file_comes_back_as_it_was_sent(client: AsyncBatches) -> None:
    file = await client.create_file(
        pieces(b"one", b"", b"two" * 200_000), filename="/home/me/in.jsonl", purpose="batch"
    )
    assert file.plain() | {"created_at": 0, "expires_at": 0} == {
        "id": file.file_id,
        "object": "file",
        "bytes": 600_003,
        "created_at": 0,
        "expires_at": 0,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    found, content = await client.content(file.file_id)
    assert found == file
    assert b"".join([data async for data in content]) == b"one" + b"two" * 200_000


async def test_a_file_lives_for_thirty_days_or_as_long_as_it_is_told(
    client: AsyncBatches, redis_client: redis.Redis
) -> None:
    month, day = await put(client), None
    day = await put(client, expires_after={"anchor": "created_at", "seconds": 86400})
    assert month.expires_ms - month.created_ms == 30 * 86_400_000
    assert day.expires_ms - day.created_ms == 86_400_000
    assert 86_300_000 < redis_client.pttl(KEYS.file("default", day.file_id)) <= 86_400_000


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": "other"}, "purpose"),
        ({"expires_after": {"anchor": "last_active_at", "seconds": 3600}}, "expires_after.anchor"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "created_at", "seconds": True}}, "expires_after.seconds"),
        ({"expires_after": "soon"}, "expires_after.anchor"),
    ],
)
async def test_a_refused_file_leaves_nothing_in_the_store(
    client: AsyncBatches, blobs: BlobStore, options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await put(client, **options)
    assert refused.value.field == field
    assert not list(blobs.list())


async def test_a_file_above_the_limit_is_refused_while_it_comes(
    client: AsyncBatches, blobs: BlobStore
) -> None:
    with pytest.raises(RequestTooLarge, match="more than 99 bytes") as refused:
        async with client.begin_upload(99) as upload:
            await upload.write(bytes(99))
            await upload.write(b"x")
    assert refused.value.field == "file" and not list(blobs.list())


async def test_the_limit_of_an_input_of_a_batch_holds_wherever_its_purpose_is_told(
    client: AsyncBatches, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_BATCH_INPUT_BYTES == 200_000_000
    monkeypatch.setattr(transfer, "MAX_BATCH_INPUT_BYTES", 99)
    with pytest.raises(RequestTooLarge, match="more than 99 bytes, the limit of a file of a batch"):
        await put(client, bytes(100))
    with pytest.raises(RequestTooLarge):
        async with client.begin_upload() as upload:
            await upload.write(bytes(100))
            await client.finish_upload(upload, filename="in.jsonl", purpose="batch")
    assert not list(blobs.list())
    assert (await put(client, bytes(99))).num_bytes == 99
    assert (await put(client, bytes(100), purpose="user_data")).num_bytes == 100


async def test_files_are_listed_in_pages_in_both_orders(client: AsyncBatches) -> None:
    ids = [(await put(client)).file_id for _ in range(7)]
    newest = sorted(ids, reverse=True)
    page = await client.files(limit=3)
    assert [file.file_id for file in page.items] == newest[:3] and page.has_more
    page = await client.files(limit=4, after=newest[2])
    assert [file.file_id for file in page.items] == newest[3:] and not page.has_more
    page = await client.files(limit=2, order="asc")
    told = page.plain()
    assert [one["id"] for one in told["data"]] == newest[:-3:-1]
    assert (told["first_id"], told["last_id"], told["has_more"]) == (newest[-1], newest[-2], True)


async def test_a_page_goes_on_behind_a_file_that_was_deleted_meanwhile(
    client: AsyncBatches,
) -> None:
    newest = sorted([(await put(client)).file_id for _ in range(4)], reverse=True)
    await client.delete_file(newest[1])
    page = await client.files(after=newest[1])
    assert [file.file_id for file in page.items] == newest[2:]


async def test_files_are_listed_by_purpose(client: AsyncBatches) -> None:
    await put(client)
    other = await put(client, purpose="user_data")
    page = await client.files(purpose="user_data", limit=1)
    assert list(page.items) == [other] and not page.has_more


async def test_a_deleted_file_is_gone_and_its_blob_is_due(
    client: AsyncBatches, redis_client: redis.Redis
) -> None:
    file = await put(client)
    await client.delete_file(file.file_id)
    for call in (client.file, client.delete_file, client.content):
        with pytest.raises(NoSuchObject):
            await call(file.file_id)
    [(member, due)] = redis_client.zrange(KEYS.stored_until, 0, -1, withscores=True)
    assert member.decode() == f"file default {file.file_id}"
    assert due <= file.created_ms + 60_000


@pytest.mark.parametrize("file_id", ["file-1", "x:file-1", "ünï", "", "a b"])
async def test_an_id_that_nobody_has_is_not_found(client: AsyncBatches, file_id: str) -> None:
    with pytest.raises(NoSuchObject):
        await client.file(file_id)


async def test_a_tenant_does_not_see_the_files_of_another(
    client: AsyncBatches, redis_url: str, blobs: BlobStore
) -> None:
    file = await put(client)
    async with AsyncBatches(redis_url, tenant="other", blobs=blobs) as other:
        for file_id in (file.file_id, f"default:{file.file_id}"):
            with pytest.raises(NoSuchObject):
                await other.file(file_id)
            with pytest.raises(NoSuchObject):
                await other.delete_file(file_id)
        assert not (await other.files()).items
        with pytest.raises(NoSuchObject):
            await other.create_batch(input_file_id=file.file_id, endpoint="/v1/completions")


async def test_a_tenant_with_an_odd_name_stays_within_its_folder(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    blobs = BlobStore(str(tmp_path / "blobs"))
    async with AsyncBatches(redis_url, tenant="..", blobs=blobs) as client:
        file = await put(client)
        assert [blob.name for blob in blobs.list()] == [file_blob(KEYS, "..", file.file_id)]
        assert (tmp_path / "blobs" / "00" / "files" / "t-.." / file.file_id).exists()


async def test_a_store_that_says_nothing_holds_up_no_threads_of_others() -> None:
    speaks = threading.Event()
    waiting = [asyncio.create_task(beside_loop(speaks.wait)) for _ in range(64)]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "prepared"), 30) == "prepared"
        assert not any(task.done() for task in waiting)
    finally:
        speaks.set()
    assert await asyncio.gather(*waiting) == [True] * 64


@pytest.mark.parametrize("after", ["", "nope", "file-x", f"job_00{'0' * 26}", "\ud800"])
async def test_a_page_behind_what_is_no_id_is_refused(client: AsyncBatches, after: str) -> None:
    for listed in (client.files, client.batches):
        with pytest.raises(InvalidRequest) as refused:
            await listed(after=after)
        assert refused.value.field == "after"


async def test_a_page_behind_what_is_of_the_other_kind_is_refused(client: AsyncBatches) -> None:
    with pytest.raises(InvalidRequest, match="not the id of a file"):
        await client.files(after=new_batch_id())
    with pytest.raises(InvalidRequest, match="not the id of a batch"):
        await client.batches(after=new_file_id())


async def test_a_batch_whose_key_comes_twice_at_once_is_one(client: AsyncBatches) -> None:
    file = await put(client)

    async def make(**options: str) -> Batch:
        return await client.create_batch(
            input_file_id=file.file_id, endpoint="/v1/completions", idempotency_key="k", **options
        )

    made = await asyncio.gather(make(), make(), make())
    assert len({batch.batch_id for batch in made}) == 1
    await client.delete_file(file.file_id)
    assert (await make()).batch_id == made[0].batch_id
    with pytest.raises(IdempotencyConflict):
        await make(completion_window="1h")
    assert len((await client.batches()).items) == 1
