"""Audio that is too large for a message, from the blob store."""

import logging
from collections.abc import Callable

from tidemill.protocol.errors import BlobError, BlobNotFound, ConfigError
from tidemill.protocol.files import file_blob
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.requests import TranscribeRequest
from tidemill.service.blobs.identity import store_identity
from tidemill.service.blobs.store import BlobStore
from tidemill.service.config import ServiceConfig

_log = logging.getLogger(__name__)


class AudioSource:
    """Where the audio of jobs is; ``identity`` is the blob store's, "" if none can be read."""

    def __init__(self, keys: ShardKeys, open_store: Callable[[], BlobStore]) -> None:
        self._keys = keys
        self._blobs: BlobStore | None = None
        self.identity = ""
        try:
            self._blobs = open_store()
            self.identity = store_identity(self._blobs)
        except (BlobError, ConfigError) as error:
            _log.warning("stored audio will be refused: %s", error.one_line())

    @classmethod
    def of(cls, service: ServiceConfig) -> "AudioSource":
        """Return the source of the shard and the store that a process is set to."""
        return cls(ShardKeys(service.shard), lambda: BlobStore(service.blob_url))

    def read(self, request: TranscribeRequest) -> bytes:
        """Return the content of a job's file; raises ``BlobError``."""
        stored = request.stored
        if stored is None:
            return request.audio or b""
        if self._blobs is None:
            raise BlobError(
                "stored: this worker reads no blob store",
                fix="Install tidemill[audio] and set TIDEMILL_BLOB_URL as the gateway has it.",
            )
        try:
            # The folder is the tenant's: no id leads to the file of another one.
            return self._blobs.read(file_blob(self._keys, request.tenant, stored.file_id))
        except BlobNotFound as error:
            raise BlobNotFound(
                f"stored: the audio {stored.file_id} is not in this worker's blob store",
                fix="Send it again, and see that TIDEMILL_BLOB_URL is the same everywhere.",
            ) from error
