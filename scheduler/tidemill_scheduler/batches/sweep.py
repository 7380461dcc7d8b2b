"""Deletes from the blob store what nobody needs any more."""

import asyncio
import logging
from typing import cast

import redis.asyncio

from tidemill.protocol import calls
from tidemill.protocol.errors import BlobError, BlobNotFound
from tidemill.protocol.files import file_blob, file_member, owner_of, part_blobs
from tidemill.protocol.functions import run_async
from tidemill.protocol.ids import new_ulid
from tidemill.protocol.keys import ShardKeys
from tidemill.service.blobs.store import BlobInfo, BlobStore
from tidemill.service.blobs.writers import PART_SUFFIX
from tidemill_scheduler.clock import server_ms

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 5.0
_ORPHANS_EVERY_SECONDS = 3600.0
#: Younger ones may be on their way.
ORPHAN_SECONDS = 3600.0
_PAGE = 128
#: What tells whose store it is: a blob, and a field of the measures.
_MARK_NAME, _MARK_FIELD = "owner", "own"


class StoreSweep:
    """A duty of the leader: files and batches that are over, blobs that nobody knows."""

    def __init__(self, client: redis.asyncio.Redis, keys: ShardKeys, blobs: BlobStore) -> None:
        self._client, self._keys, self._blobs = client, keys, blobs

    async def run(self) -> None:
        """Sweep for ever."""
        waited = _ORPHANS_EVERY_SECONDS
        while True:
            try:
                await self.forget_due()
                if waited >= _ORPHANS_EVERY_SECONDS:
                    await self.delete_orphans()
                    waited = 0.0
            except BlobError as error:
                _log.warning("the sweep of the blob store waits: %s", error.one_line())
            await asyncio.sleep(_INTERVAL_SECONDS)
            waited += _INTERVAL_SECONDS

    async def forget_due(self) -> int:
        """Delete what is over; returns how many files and batches that were."""
        num, now = 0, await server_ms(self._client)
        while members := await self._due(now):
            for member in members:
                await self._forget(member)
            num += len(members)
        return num

    async def delete_orphans(self) -> int:
        """Delete old blobs that no file and no batch has, such as of an upload that was cut off.

        Only where the store is known to be this broker's: the same folder may be another's.
        """
        found = await asyncio.to_thread(lambda: list(self._blobs.list(self._keys.shard)))
        unknown = [blob for blob in found if not await self._is_known(blob)]
        if not await self._is_ours(is_clean=not unknown):
            return 0
        old = [blob for blob in unknown if blob.age_seconds > ORPHAN_SECONDS]
        for blob in old:
            await asyncio.to_thread(self._blobs.delete, blob.name)
        return len(old)

    async def _is_ours(self, *, is_clean: bool) -> bool:
        """Whether the store bears the mark of this broker; a clean one without a mark gets it."""
        await self._client.hsetnx(self._keys.measures, _MARK_FIELD, new_ulid())
        mark = cast(bytes, await self._client.hget(self._keys.measures, _MARK_FIELD))
        found = await asyncio.to_thread(self._read_mark)
        if not found and is_clean and mark:
            await asyncio.to_thread(self._write_mark, mark)
            return True
        if found != mark:
            _log.warning("the blob store has files of another broker; none is taken for an orphan")
        return found == mark

    def _read_mark(self) -> bytes:
        try:
            with self._blobs.reader(self._mark_name) as file:
                return file.read()
        except BlobNotFound:
            return b""

    def _write_mark(self, mark: bytes) -> None:
        with self._blobs.writer(self._mark_name) as writer:
            writer.write(mark)
            writer.commit()

    @property
    def _mark_name(self) -> str:
        return f"{self._keys.shard}/{_MARK_NAME}"

    async def _due(self, now: int) -> list[bytes]:
        found = await self._client.zrangebyscore(
            self._keys.stored_until, "-inf", now, start=0, num=_PAGE
        )
        return cast(list[bytes], found)

    async def _forget(self, member: bytes) -> None:
        owner = owner_of(member.decode("utf-8", "replace"))
        if owner is None:
            _log.warning("%r is neither a file nor a batch", member[:80])
            await self._client.zrem(self._keys.stored_until, member)
            return
        kind, tenant, object_id = owner
        if kind == "file":
            blob = file_blob(self._keys, tenant, object_id)
            call = calls.forget_file(self._keys, tenant, object_id)
        else:
            blob = part_blobs(self._keys, tenant, object_id)
            call = calls.forget_batch(self._keys, tenant, object_id)
        # First the blobs: whoever dies in between begins again.
        await asyncio.to_thread(self._blobs.delete, blob)
        await run_async(self._client, call)
        _log.info("forgot the %s %s", kind, object_id)

    async def _is_known(self, blob: BlobInfo) -> bool:
        if blob.name == self._mark_name:
            return True
        if blob.name.endswith(PART_SUFFIX):
            return False
        _, kind, folder, object_id, *_ = [*blob.name.split("/"), "", "", ""]
        tenant = folder.removeprefix("t-")
        if kind == "parts":
            member = calls.active_member(tenant, object_id)
            return await self._client.zscore(self._keys.active_batches, member) is not None
        member = file_member(tenant, object_id)
        return await self._client.zscore(self._keys.stored_until, member) is not None
