"""The files that a batch ends with, made of the parts of its output."""

import asyncio
from collections.abc import Sequence

from tidemill._async_link import AsyncLink
from tidemill.batches.paging import hashes
from tidemill.protocol import calls
from tidemill.protocol.batches import Batch
from tidemill.protocol.files import DEFAULT_FILE_SECONDS, Purpose, StoredFile
from tidemill.protocol.keys import ShardKeys
from tidemill.service.runtime import crash_point
from tidemill_scheduler.batches.lease import BatchName
from tidemill_scheduler.batches.parts import OutputBlobs, PartCounts

#: What the hash of a batch says of its files if there are none.
NO_FILES = ("of", "", "ef", "")


class BatchFiles:
    """Output and error file of one batch; whoever makes them again makes the same."""

    def __init__(
        self, link: AsyncLink, keys: ShardKeys, name: BatchName, output: OutputBlobs
    ) -> None:
        self._link, self._keys, self._name = link, keys, name
        self._output = output

    async def parts(self) -> list[PartCounts]:
        """Return what is counted, in the order of the input."""
        key = self._keys.batch_parts(self._name.tenant, self._name.batch_id)
        [fields] = await self._link.read(hashes([key]))
        counts = ((int(number), *map(int, told.split())) for number, told in fields.items())
        return sorted((PartCounts(*each) for each in counts), key=lambda part: part.number)

    async def make(self, batch: Batch) -> tuple[str, ...]:
        """Put the files together; returns their ids as fields of the batch's hash."""
        parts = await self.parts()
        answers = [part.number for part in parts if part.num_answered]
        errors = [part.number for part in parts if part.num_failed]
        output = await self._assemble(batch, batch.output_file_id, answers, "out")
        error = await self._assemble(batch, batch.error_file_id, errors, "err")
        return ("of", output, "ef", error)

    async def _assemble(self, batch: Batch, file_id: str, parts: Sequence[int], kind: str) -> str:
        """Make a file of parts, and known; returns its id, "" where it would be empty."""
        if not parts:
            return ""
        num_bytes = await asyncio.to_thread(self._output.assemble, file_id, parts, kind)
        crash_point("batch.after_assembly")
        suffix = {"out": "output", "err": "error"}[kind]
        filename = f"{self._name.batch_id}_{suffix}.jsonl"
        file = StoredFile(file_id, num_bytes, filename, Purpose.BATCH_OUTPUT)
        ttl_ms = (batch.output_seconds or DEFAULT_FILE_SECONDS) * 1000
        put = calls.put_file(self._keys, self._name.tenant, file, ttl_ms=ttl_ms)
        await self._link.call(put)
        return file_id
