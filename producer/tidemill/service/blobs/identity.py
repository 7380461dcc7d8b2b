"""Which store this is: processes that read the same identity see the same blobs."""

from tidemill.protocol.errors import BlobNotFound
from tidemill.protocol.ids import new_ulid
from tidemill.service.blobs.store import BlobStore

_NAME = "identity"
_MAX_CHARS = 64


def store_identity(blobs: BlobStore) -> str:
    """Return the name that a store bears; a new one gets one first.  Raises ``BlobError``.

    Of two processes that begin one store at the same moment one may read a name that the other
    replaces; asking again tells the one that stays.
    """
    try:
        return _read(blobs)
    except BlobNotFound:
        with blobs.writer(_NAME) as writer:
            writer.write(new_ulid().encode())
            writer.commit()
    return _read(blobs)


def _read(blobs: BlobStore) -> str:
    return blobs.read(_NAME).decode("ascii", "replace")[:_MAX_CHARS]
