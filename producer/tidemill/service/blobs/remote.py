"""File systems behind a network: bounded in memory and in time."""

import io
from typing import Any

from tidemill.service.blobs.failures import translate

#: What is fetched at once, and sent at once; s3fs by itself takes 50 MiB.
BLOCK_BYTES = 4 << 20
_SEND_BYTES = 8 << 20
_SENDS_AT_ONCE = 2

_S3_SCHEMES = ("s3://", "s3a://")
_CONNECT_SECONDS, _READ_SECONDS = 3, 10
#: s3fs tries again what went wrong on the wire, botocore also what the server calls its own fault.
_S3FS_TRIES, _BOTOCORE_TRIES = 2, 2


def open_options(url: str) -> dict[str, Any]:
    """Return what a file system is opened with."""
    if not url.startswith(_S3_SCHEMES):
        return {}
    return {
        # Other processes write to the store as well.
        "use_listings_cache": False,
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": _BOTOCORE_TRIES},
        },
    }


def bound_retries(fs: Any) -> None:
    """Let s3fs give up in time: by itself it waits for a silent server for minutes."""
    if is_s3(fs):
        fs.retries = _S3FS_TRIES


def send(fs: Any, source: str, path: str) -> None:
    """Send a local file; it appears as a whole."""
    if is_s3(fs):
        fs.put_file(source, path, chunksize=_SEND_BYTES, max_concurrency=_SENDS_AT_ONCE)
        return
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put_file(source, path)


def is_s3(fs: Any) -> bool:
    """Whether it has buckets instead of directories."""
    return "s3" in protocols(fs)


def protocols(fs: Any) -> tuple[str, ...]:
    """Return the names under which fsspec knows a file system."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


class BlobFile(io.RawIOBase):
    """A blob that is read in ranges, whose failures are told as those of its store."""

    def __init__(self, file: Any, name: str, store: str) -> None:
        self._file, self._name, self._store = file, name, store

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the place."""
        return int(self._file.tell())

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or less of it at the end."""
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """Return the rest."""
        return self._read(-1)

    def _read(self, num_bytes: int) -> bytes:
        with translate(self._name, self._store):
            return bytes(self._file.read(num_bytes))
