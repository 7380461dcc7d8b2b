"""What file systems raise, in our own words."""

from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.protocol.errors import BlobError, BlobNotFound


@contextmanager
def translate(name: str) -> Iterator[None]:
    """Raise ``BlobNotFound`` or ``BlobError`` in place of what a file system raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise BlobNotFound(f"there is no blob {name}") from error
    except OSError as error:
        raise BlobError(
            f"the blob store refused {name}: {error.strerror or error}",
            fix="See whether TIDEMILL_BLOB_URL can be written to and has room.",
        ) from error
