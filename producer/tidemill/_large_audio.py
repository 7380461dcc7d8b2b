"""Audio that is too large to travel with its job: it waits in the blob store for the worker."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from tidemill.job_kinds import Audio
from tidemill.protocol.errors import InvalidRequest, NoSuchObject
from tidemill.protocol.files import Purpose
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.requests import MAX_AUDIO_BYTES, MAX_STORED_AUDIO_BYTES, StoredAudio
from tidemill.service.audio_length import audio_seconds

T = TypeVar("T")

#: How long a file is kept whose job somebody may still ask for.
_KEPT_SECONDS = 7 * 24 * 3600


class AudioShelf:
    """Where a producer's large audio waits; ``url`` and ``tenant`` are the producer's."""

    def __init__(self, url: str, tenant: str) -> None:
        self._url, self._tenant = url, tenant

    @asynccontextmanager
    async def holding(
        self, audio: Audio, card: ModelCard, *, outlives: bool
    ) -> AsyncIterator[Audio | StoredAudio]:
        """Give small audio back as it is; put large one into the store, for the block.

        With ``outlives`` it is left for seven days where the block fails: somebody may ask for the
        job again.  Raises ``InvalidRequest`` or ``BlobError``.
        """
        if not _is_large(audio):
            yield audio
            return
        stored = await self._put(audio, card)
        try:
            yield stored
        except BaseException:
            if not outlives:
                await self._drop(stored)
            raise
        await self._drop(stored)

    @contextmanager
    def holding_blocking(
        self, audio: Audio, card: ModelCard, *, outlives: bool
    ) -> Iterator[Audio | StoredAudio]:
        """``holding`` for callers without an event loop, or in one that they may block."""
        if not _is_large(audio):
            yield audio
            return
        stored = _run_apart(self._put(audio, card))
        try:
            yield stored
        except BaseException:
            if not outlives:
                _run_apart(self._drop(stored))
            raise
        _run_apart(self._drop(stored))

    async def _put(self, audio: Audio, card: ModelCard) -> StoredAudio:
        # Here, because most producers need no store.
        from tidemill.batches.client import AsyncBatches
        from tidemill.service.blobs.identity import store_identity
        from tidemill.service.blobs.store import BlobStore
        from tidemill.service.config import load_config

        blobs = BlobStore(load_config().blob_url)
        if card.blob_store != await asyncio.to_thread(store_identity, blobs):
            raise _other_store(card)
        content = await asyncio.to_thread(_content, audio)
        async with AsyncBatches(self._url, tenant=self._tenant, blobs=blobs) as batches:
            file = await batches.create_file(
                _once(content),
                filename=Path(audio).name if isinstance(audio, str | PathLike) else "audio",
                purpose=Purpose.USER_DATA,
                expires_after={"anchor": "created_at", "seconds": _KEPT_SECONDS},
            )
        return StoredAudio(
            file_id=file.file_id,
            num_bytes=len(content),
            seconds=audio_seconds(content),
            sha256=sha256(content).hexdigest(),
        )

    async def _drop(self, stored: StoredAudio) -> None:
        from tidemill.batches.client import AsyncBatches

        async with AsyncBatches(self._url, tenant=self._tenant) as batches:
            with suppress(NoSuchObject):
                await batches.delete_file(stored.file_id)


def _run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    # asyncio.run refuses a thread that has a loop already.
    with ThreadPoolExecutor(1, "audio") as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _is_large(audio: Audio) -> bool:
    if isinstance(audio, bytes | bytearray | memoryview):
        return len(audio) > MAX_AUDIO_BYTES
    if not isinstance(audio, str | PathLike):
        return False  # whoever reads it tells what is wrong with it
    try:
        return Path(audio).stat().st_size > MAX_AUDIO_BYTES
    except OSError:
        return False


def _content(audio: Audio) -> bytes:
    size = Path(audio).stat().st_size if isinstance(audio, str | PathLike) else len(audio)
    if size > MAX_STORED_AUDIO_BYTES:
        raise InvalidRequest(
            f"audio: {size} bytes, the limit is {MAX_STORED_AUDIO_BYTES}",
            field="audio",
            fix="Compress it as 16 kHz mono MP3, Ogg or FLAC, or send it in pieces.",
        )
    return Path(audio).read_bytes() if isinstance(audio, str | PathLike) else bytes(audio)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _other_store(card: ModelCard) -> InvalidRequest:
    return InvalidRequest(
        f"audio: it has more than {MAX_AUDIO_BYTES} bytes, and the workers of {card.name!r} read no"
        " blob store that this process writes to",
        field="audio",
        fix="Set TIDEMILL_BLOB_URL to one place for both, compress it, or send it to a gateway.",
    )
