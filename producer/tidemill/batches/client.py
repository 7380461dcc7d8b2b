"""Files and batches of one tenant, as the gateway and the command line use them."""

from collections.abc import AsyncIterable, AsyncIterator
from types import TracebackType
from typing import Any, Self

from tidemill._async_link import AsyncLink
from tidemill._async_shared import AsyncShared
from tidemill._endpoint import find_endpoint
from tidemill._patience import DEFAULT_TIMEOUT_SECONDS
from tidemill._reads import Read
from tidemill._request import checked_key
from tidemill._terms import checked_callback, checked_metadata
from tidemill.batches.paging import Page, collect, hashes, ids_behind
from tidemill.batches.terms import (
    checked_after,
    checked_endpoint,
    checked_expiry,
    checked_filename,
    checked_limit,
    checked_purpose,
    expiry_seconds,
    window_seconds,
)
from tidemill.batches.transfer import UploadedBlob, beside_loop, content_of
from tidemill.protocol import calls
from tidemill.protocol.batches import Batch, BatchState, NewBatch
from tidemill.protocol.errors import InvalidRequest, NoSuchObject, WrongState
from tidemill.protocol.files import MAX_FILE_BYTES, Purpose, StoredFile, file_blob
from tidemill.protocol.ids import BATCH_PREFIX, FILE_PREFIX, new_batch_id, new_file_id
from tidemill.service.blobs.store import BlobStore
from tidemill.service.config import load_config

_MAX_FILES = 10_000
_MAX_BATCHES = 100
_DEFAULT_BATCHES = 20


class AsyncBatches:
    """Files and batches of one tenant; ``url`` and ``blobs`` default to the configured ones.

    Every call raises ``BrokerUnavailable`` if the broker stays away for ``timeout`` seconds, and
    ``BlobError`` if the blob store refuses something.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        tenant: str = "default",
        shard: str | None = None,
        blobs: BlobStore | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        _shared: AsyncShared | None = None,
    ) -> None:
        endpoint = find_endpoint(url, tenant, shard)
        self._keys, self._tenant = endpoint.keys, endpoint.tenant
        self._blobs = blobs or BlobStore(load_config().blob_url)
        if _shared is None:
            self._link = AsyncLink(endpoint.url, endpoint.keys.shard, timeout)
        else:
            self._link = _shared.links(endpoint).home
        self._is_shared = _shared is not None

    async def create_file(
        self,
        content: AsyncIterable[bytes],
        *,
        filename: str,
        purpose: str,
        expires_after: object = None,
    ) -> StoredFile:
        """Store a file; its content is never whole in memory.  Raises ``InvalidRequest``."""
        upload = self.begin_upload()
        upload.bound_for(purpose)
        async with upload:
            async for data in content:
                await upload.write(data)
            return await self.finish_upload(
                upload, filename=filename, purpose=purpose, expires_after=expires_after
            )

    def begin_upload(self, max_bytes: int = MAX_FILE_BYTES) -> UploadedBlob:
        """Return what takes the content of a file, in a context; ``finish_upload`` keeps it."""
        file_id = new_file_id()
        blob = file_blob(self._keys, self._tenant, file_id)
        return UploadedBlob(self._blobs, blob, file_id, max_bytes)

    async def finish_upload(
        self, upload: UploadedBlob, *, filename: str, purpose: str, expires_after: object = None
    ) -> StoredFile:
        """Keep what was uploaded.  Raises ``InvalidRequest``; ``RequestTooLarge`` is one."""
        upload.bound_for(purpose)
        file = StoredFile(
            upload.file_id,
            upload.num_bytes,
            checked_filename(filename),
            checked_purpose(purpose),
        )
        seconds = expiry_seconds(expires_after)
        # A blob that nobody has heard of is swept; a file without a blob would be a promise broken.
        await upload.commit()
        await self._link.call(calls.put_file(self._keys, self._tenant, file, ttl_ms=seconds * 1000))
        return await self.file(upload.file_id)

    async def file(self, file_id: str) -> StoredFile:
        """Look at a file; raises ``NoSuchObject``."""
        [found] = await self._files([file_id])
        if found is None:
            raise _missing("file", file_id)
        return found

    async def files(
        self,
        *,
        after: str | None = None,
        limit: object = None,
        order: str | None = None,
        purpose: str | None = None,
    ) -> Page[StoredFile]:
        """Return a page of the files behind the id ``after``, which may be gone.

        Raises ``InvalidRequest``.
        """
        if order not in (None, "asc", "desc"):
            raise InvalidRequest("order: it is neither asc nor desc", field="order")

        async def load(ids: list[str]) -> list[StoredFile | None]:
            found = await self._files(ids)
            return [f for f in found if f is None or purpose in (None, f.purpose)]

        async def next_ids(behind: str) -> list[str]:
            index = self._keys.files(self._tenant)
            return await self._link.read(ids_behind(index, behind, ascending=order == "asc"))

        most = checked_limit(limit, _MAX_FILES, _MAX_FILES)
        return await collect(most, next_ids, load, checked_after(after, FILE_PREFIX))

    async def content(self, file_id: str) -> tuple[StoredFile, AsyncIterator[bytes]]:
        """Return a file and its content, piece by piece; raises ``NoSuchObject``."""
        file = await self.file(file_id)
        name = file_blob(self._keys, self._tenant, file_id)
        # Told here, where an answer may still be an error, and not when half of it is out.
        await beside_loop(self._blobs.size, name)
        return file, content_of(self._blobs, name)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file; a batch that reads it goes on.  Raises ``NoSuchObject``."""
        _check_id("file", file_id)
        if not await self._link.call(calls.drop_file(self._keys, self._tenant, file_id)):
            raise _missing("file", file_id)

    async def create_batch(
        self,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str = "24h",
        metadata: object = None,
        output_expires_after: object = None,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Accept a batch; the same one again for the same key and the same terms.

        Raises ``InvalidRequest``, ``IdempotencyConflict`` or ``NoSuchObject``.
        """
        _check_id("file", input_file_id)
        batch = NewBatch(
            batch_id=new_batch_id(),
            endpoint=checked_endpoint(endpoint),
            input_file_id=input_file_id,
            window=completion_window,
            window_seconds=window_seconds(completion_window),
            metadata=checked_metadata(metadata),
            output_seconds=checked_expiry(output_expires_after, "output_expires_after"),
            callback_url=checked_callback(callback_url),
            idempotency_key=checked_key(idempotency_key),
        )
        # The input of one that was accepted before may be gone.
        if not batch.idempotency_key or not await self._is_known(batch.idempotency_key):
            await self._check_input(input_file_id)
        _, batch_id = await self._link.call(calls.create_batch(self._keys, self._tenant, batch))
        return await self.batch(batch_id)

    async def batch(self, batch_id: str) -> Batch:
        """Look at a batch; raises ``NoSuchObject``."""
        [found] = await self._batches([batch_id])
        if found is None:
            raise _missing("batch", batch_id)
        return found

    async def batches(self, *, after: str | None = None, limit: object = None) -> Page[Batch]:
        """Return a page of the batches behind the id ``after``, the newest first.

        That one may be gone.  Raises ``InvalidRequest``.
        """

        async def next_ids(behind: str) -> list[str]:
            index = self._keys.batch_objects(self._tenant)
            return await self._link.read(ids_behind(index, behind, ascending=False))

        most = checked_limit(limit, _DEFAULT_BATCHES, _MAX_BATCHES)
        behind = checked_after(after, BATCH_PREFIX)
        return await collect(most, next_ids, self._batches, behind)

    async def cancel_batch(self, batch_id: str) -> Batch:
        """Ask for the end of a batch.  Raises ``NoSuchObject``, ``WrongState`` if it has ended."""
        _check_id("batch", batch_id)
        stop = calls.stop_batch(
            self._keys,
            self._tenant,
            batch_id,
            output_id=new_file_id(),
            error_id=new_file_id(),
        )
        stopped, state = await self._link.call(stop)
        if not state:
            raise _missing("batch", batch_id)
        if not stopped and state != BatchState.CANCELLED:
            raise WrongState(f"the batch {batch_id} is {state} and cannot be cancelled any more")
        return await self.batch(batch_id)

    async def close(self) -> None:
        """Close the connections; batches go on."""
        if not self._is_shared:
            await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _is_known(self, key: str) -> bool:
        command = ("GET", self._keys.idempotency(self._tenant, key))
        return await self._link.read(Read((command,), lambda replies: replies[0] is not None))

    async def _check_input(self, file_id: str) -> None:
        file = await self.file(file_id)
        if file.purpose != Purpose.BATCH:
            raise InvalidRequest(
                f"input_file_id: the purpose of {file_id} is {file.purpose}",
                field="input_file_id",
                fix="Upload it with the purpose batch.",
            )

    async def _files(self, ids: list[str]) -> list[StoredFile | None]:
        names = [self._keys.file(self._tenant, _check_id("file", one)) for one in ids]
        found = await self._link.read(hashes(names))
        return [StoredFile.read(one, fields) for one, fields in zip(ids, found, strict=True)]

    async def _batches(self, ids: list[str]) -> list[Batch | None]:
        names = [self._keys.batch_object(self._tenant, _check_id("batch", one)) for one in ids]
        found = await self._link.read(hashes(names))
        return [Batch.read(one, fields) for one, fields in zip(ids, found, strict=True)]


def _check_id(kind: str, object_id: Any) -> str:
    # Another tenant's name in an id would be another tenant's key.
    if not isinstance(object_id, str) or not object_id.isascii() or ":" in object_id:
        raise _missing(kind, str(object_id))
    return object_id


def _missing(kind: str, object_id: str) -> NoSuchObject:
    return NoSuchObject(f"there is no {kind} {object_id[:80]!r}", object_id=object_id)
