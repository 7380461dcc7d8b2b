"""Named blobs in a local directory or any file system that fsspec knows."""

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, cast
from uuid import uuid4

from tidemill.protocol.errors import BlobError, BlobNotFound, ConfigError
from tidemill.service.blobs.failures import translate
from tidemill.service.blobs.remote import (
    BLOCK_BYTES,
    BlobFile,
    bound_retries,
    open_options,
    protocols,
)
from tidemill.service.blobs.writers import PART_SUFFIX, BlobWriter, LocalWriter, RemoteWriter

_REMOTE_READS = {"block_size": BLOCK_BYTES}
_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob that is there: its name, its size in bytes and its age in seconds, 0 if unknown."""

    name: str
    num_bytes: int
    age_seconds: float


class BlobStore:
    """A tree of blobs below ``url``, such as ``/var/lib/tidemill/blobs`` or ``s3://bucket/prefix``.

    All calls block.  Names are paths without a leading slash.  Raises ``ConfigError`` for an
    address that nobody can open, ``BlobNotFound``, ``BlobUnavailable`` and ``BlobError`` from then
    on.
    """

    def __init__(self, url: str) -> None:
        self._fs, self._root = _open_file_system(url)
        self.is_local = "file" in protocols(self._fs)
        #: For people; never with a password, which fsspec takes out of an address.
        self.title = self._root if self.is_local else f"{protocols(self._fs)[0]}://{self._root}"

    def writer(self, name: str) -> BlobWriter:
        """Return a writer of the blob ``name``."""
        path = self._path(name)
        if self.is_local:
            return LocalWriter(path, f"{path}.{uuid4().hex}{PART_SUFFIX}", self.title)
        return RemoteWriter(self._fs, path, self.title)

    @contextmanager
    def reader(self, name: str) -> Iterator[BinaryIO]:
        """Open a blob; it can be sought in."""
        path = self._path(name)
        with translate(name, self.title):
            file = self._fs.open(path, "rb", **({} if self.is_local else _REMOTE_READS))
        with file:
            raw = BlobFile(file, name, self.title)
            yield cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))

    def read(self, name: str) -> bytes:
        """Return the whole content of a blob."""
        with self.reader(name) as file, translate(name, self.title):
            return file.read()

    def size(self, name: str) -> int:
        """Return how many bytes a blob has."""
        with translate(name, self.title):
            self._fs.invalidate_cache()
            return int(self._fs.size(self._path(name)))

    def has(self, name: str) -> bool:
        """Whether there is such a blob."""
        try:
            self.size(name)
        except BlobNotFound:
            return False
        return True

    def delete(self, name: str) -> None:
        """Delete a blob, or all blobs whose names begin with ``name`` and a slash, if there are."""
        with translate(name, self.title):
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return  # it is gone, which is what was asked for

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Return the blobs below a prefix, incomplete ones included."""
        top = self._path(prefix) if prefix else self._root
        with translate(prefix, self.title):
            self._fs.invalidate_cache()
            found = self._fs.find(top, detail=True) if self._fs.exists(top) else {}
        for path, told in sorted(found.items()):
            name = path.removeprefix(self._root).lstrip("/")
            yield BlobInfo(name, int(told.get("size") or 0), _age_seconds(told))

    def _path(self, name: str) -> str:
        if not name or name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
            raise BlobError(f"{name[:200]!r} is no name of a blob")
        return f"{self._root}/{name}"


def _open_file_system(url: str) -> tuple[Any, str]:
    url_to_fs = _fsspec()
    try:
        fs, root = url_to_fs(url, **open_options(url))
        bound_retries(fs)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(
            f"the blob store {url!r} cannot be opened: {error}",
            fix="TIDEMILL_BLOB_URL takes a directory or an address that fsspec knows;"
            " s3:// needs tidemill[s3].",
        ) from error
    return fs, root.rstrip("/")


@functools.cache
def _fsspec() -> Any:
    # Optional: a producer that uses no files does not need it.
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(
            "files and batches need the package fsspec",
            fix="Install tidemill[batches], tidemill[gateway] or tidemill[scheduler].",
        ) from error
    return url_to_fs


def _age_seconds(told: dict[str, Any]) -> float:
    # File systems tell their time under names of their own; one that does not has no orphans swept.
    found = told.get("mtime", told.get("LastModified", told.get("created")))
    if isinstance(found, datetime):
        return max(0.0, (datetime.now(found.tzinfo) - found).total_seconds())
    if isinstance(found, int | float):
        return max(0.0, datetime.now().timestamp() - found)
    return 0.0
