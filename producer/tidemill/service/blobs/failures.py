"""What file systems raise, in our own words."""

from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.protocol.errors import BlobError, BlobNotFound, BlobUnavailable, TidemillError

#: Classes of botocore and aiohttp, which are no ``OSError``: a server that does not answer.
_SILENCES = frozenset({"ConnectionError", "HTTPClientError", "ClientConnectionError"})
_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError"})


@contextmanager
def translate(name: str, store: str) -> Iterator[None]:
    """Raise a ``BlobError`` that names blob and store in place of what a file system raises."""
    try:
        yield
    except TidemillError:
        raise
    except Exception as error:
        # Each file system has exceptions of its own, also such as are no OSError.
        raise _told(error, name, store) from error


def _told(error: Exception, name: str, store: str) -> BlobError:
    if isinstance(error, FileNotFoundError):
        return BlobNotFound(f"there is no blob {name} in {store}")
    bases = {base.__name__ for base in type(error).__mro__}
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError) or bases & _SILENCES:
        return BlobUnavailable(
            f"the blob store {store} cannot be reached: {reason}",
            fix="See whether it runs, and whether its address is right (S3: AWS_ENDPOINT_URL_S3).",
        )
    if bases & _CREDENTIALS:
        fix = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another source of keys."
    else:
        fix = "See whether TIDEMILL_BLOB_URL can be written to and has room."
    return BlobError(f"the blob store {store} refused {name}: {reason}", fix=fix)
