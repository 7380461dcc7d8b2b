"""Content of files on its way to the blob store and from there, piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from tidemill.protocol.errors import RequestTooLarge
from tidemill.protocol.files import MAX_BATCH_INPUT_BYTES, Purpose
from tidemill.service.blobs.store import BlobStore
from tidemill.service.blobs.writers import BlobWriter

P = ParamSpec("P")
T = TypeVar("T")

#: What is written or read at once.
PIECE_BYTES = 1 << 18
#: A store that says nothing must not hold up the threads of others, which prepare prompts.
_THREADS = ThreadPoolExecutor(16, "blobs")


async def beside_loop(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do what blocks on a blob store on a thread that is there for it."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: call(*args, **kwargs))


class UploadedBlob:
    """A blob that grows, beside the event loop; leaving its context uncommitted discards it.

    It takes ``max_bytes`` at most, and less once its purpose is known to be a batch.
    """

    def __init__(self, blobs: BlobStore, name: str, file_id: str, max_bytes: int) -> None:
        self._blobs, self._name = blobs, name
        self._max_bytes = max_bytes
        self._writer: BlobWriter | None = None
        self._pending = bytearray()
        self.file_id = file_id
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Append; raises ``RequestTooLarge`` where the file becomes too large."""
        self.num_bytes += len(data)
        self._check_size()
        self._pending += data
        if len(self._pending) >= PIECE_BYTES:
            await self._flush()

    def bound_for(self, purpose: str) -> None:
        """Keep to the limit of a purpose; raises ``RequestTooLarge`` if there is more already."""
        if purpose == Purpose.BATCH:
            self._max_bytes = min(self._max_bytes, MAX_BATCH_INPUT_BYTES)
            self._check_size()

    async def commit(self) -> None:
        """Let the blob appear."""
        await self._flush()
        await beside_loop(self._open_writer().commit)

    async def __aenter__(self) -> Self:
        self._writer = await beside_loop(self._blobs.writer, self._name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await beside_loop(self._open_writer().__exit__, kind, error, traceback)

    def _check_size(self) -> None:
        if self.num_bytes <= self._max_bytes:
            return
        what = " of a batch" if self._max_bytes == MAX_BATCH_INPUT_BYTES else ""
        raise RequestTooLarge(
            f"file: it has more than {self._max_bytes} bytes, the limit of a file{what}",
            field="file",
            fix="Split it into several.",
        )

    async def _flush(self) -> None:
        data, self._pending = bytes(self._pending), bytearray()
        await beside_loop(self._open_writer().write, data)

    def _open_writer(self) -> BlobWriter:
        assert self._writer is not None, "the upload is not entered"
        return self._writer


async def content_of(blobs: BlobStore, name: str) -> AsyncIterator[bytes]:
    """Read a blob, piece by piece."""
    reader = blobs.reader(name)
    file = await beside_loop(reader.__enter__)
    try:
        while data := await beside_loop(file.read, PIECE_BYTES):
            yield data
    finally:
        await beside_loop(reader.__exit__, None, None, None)
