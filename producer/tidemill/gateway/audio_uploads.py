"""The file of a request for speech: small ones travel with the job, others through the store."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tidemill.batches.client import AsyncBatches
from tidemill.batches.transfer import UploadedBlob
from tidemill.gateway.call import Call
from tidemill.gateway.uploads import UploadForm
from tidemill.protocol.errors import InvalidRequest, RequestTooLarge
from tidemill.protocol.files import Purpose
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.requests import MAX_AUDIO_BYTES, MAX_STORED_AUDIO_BYTES, StoredAudio
from tidemill.service.audio_length import audio_seconds

#: How long a stored file waits for its job to run; it is deleted when the answer is told.
_KEPT_SECONDS = 7 * 24 * 3600
#: Of the beginning of a file, which tells how long it is.
_HEADER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class AudioForm:
    """A request that has arrived: its fields, lists under the names without brackets."""

    fields: Mapping[str, Any]
    audio: bytes | StoredAudio

    @property
    def is_stored(self) -> bool:
        """Whether the file is in the blob store."""
        return isinstance(self.audio, StoredAudio)


async def receive_audio(call: Call) -> AudioForm:
    """Read the whole form; raises ``InvalidRequest``, ``RequestTooLarge`` or ``BlobError``."""
    form = UploadForm(call.request.headers.get("content-type", ""))
    async with _Receiver(call) as receiver:
        async for data in call.request.stream():
            for piece in form.feed(data):
                await receiver.take(piece)
        form.finish()
        fields = _fields(form)
        return AudioForm(fields, await receiver.finish(form.filename))


async def stored_audio(call: Call, file_id: str) -> StoredAudio:
    """Return one of the caller's files as audio.

    Raises ``NoSuchObject``, ``RequestTooLarge`` or ``BlobError``.
    """
    file, pieces = await call.state.batches(call.identity.tenant).content(file_id)
    if file.num_bytes > MAX_STORED_AUDIO_BYTES:
        raise _too_large("file_id")
    digest, header = sha256(), b""
    async for piece in pieces:
        digest.update(piece)
        header = header or piece[:_HEADER_BYTES]
    return StoredAudio(
        file_id=file_id,
        num_bytes=file.num_bytes,
        seconds=audio_seconds(header, file.num_bytes),
        sha256=digest.hexdigest(),
    )


async def check_store(call: Call, card: ModelCard) -> None:
    """Raise ``InvalidRequest`` unless the model's workers read the gateway's blob store."""
    mine = await asyncio.to_thread(call.state.blob_identity)
    if card.blob_store != mine:
        raise InvalidRequest(
            f"file: it has more than {MAX_AUDIO_BYTES} bytes, and the workers of {card.name!r}"
            " read no blob store that this gateway writes to",
            field="file",
            fix="Set TIDEMILL_BLOB_URL to one place for both, or send a smaller file.",
        )


def _too_large(field: str) -> RequestTooLarge:
    return RequestTooLarge(
        f"{field}: it has more than {MAX_STORED_AUDIO_BYTES} bytes",
        field=field,
        fix="Compress it, or send it in pieces.",
    )


def _fields(form: UploadForm) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in form.listed:
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        elif value:
            # Forms have no null; clients send nothing in its place.
            fields[name] = value
    granularities = fields.get("timestamp_granularities")
    if isinstance(granularities, str):
        fields["timestamp_granularities"] = granularities.split(",")
    return fields


class _Receiver:
    """Gathers a file, and hands it to the store once it is too large to travel with the job."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._pending = bytearray()
        self._header = bytearray()
        self._num_bytes = 0
        self._digest = sha256()
        self._stack = AsyncExitStack()
        self._batches: AsyncBatches | None = None
        self._upload: UploadedBlob | None = None

    async def __aenter__(self) -> "_Receiver":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def take(self, data: bytes) -> None:
        """Take the next piece."""
        self._num_bytes += len(data)
        if self._num_bytes > MAX_STORED_AUDIO_BYTES:
            raise _too_large("file")
        self._digest.update(data)
        self._header += data[: _HEADER_BYTES - len(self._header)]
        self._pending += data
        if self._num_bytes > MAX_AUDIO_BYTES:
            await self._store()

    async def finish(self, filename: str) -> bytes | StoredAudio:
        """Return the file, or where it is."""
        if self._num_bytes == 0:
            raise InvalidRequest("file: it is empty", field="file")
        if self._upload is None or self._batches is None:
            return bytes(self._pending)
        file = await self._batches.finish_upload(
            self._upload,
            filename=filename,
            purpose=Purpose.USER_DATA,
            expires_after={"anchor": "created_at", "seconds": _KEPT_SECONDS},
        )
        return StoredAudio(
            file_id=file.file_id,
            num_bytes=self._num_bytes,
            seconds=audio_seconds(bytes(self._header), self._num_bytes),
            sha256=self._digest.hexdigest(),
        )

    async def _store(self) -> None:
        if self._upload is None:
            self._batches = self._call.state.batches(self._call.identity.tenant)
            self._upload = await self._stack.enter_async_context(self._batches.begin_upload())
        data, self._pending = bytes(self._pending), bytearray()
        await self._upload.write(data)
