"""Writers of blobs: none of them lets half a blob be seen, whenever its process dies."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from tidemill.protocol.errors import BlobError, BlobNotFound
from tidemill.service.blobs.failures import translate
from tidemill.service.blobs.remote import send

#: Ends the names of blobs that are not complete yet.
PART_SUFFIX = ".part"


class BlobWriter(Protocol):
    """A blob that nobody sees before ``commit``; leaving the context without one discards it."""

    def write(self, data: bytes) -> None:
        """Append."""

    def commit(self) -> None:
        """Let the blob appear, whole and on the disk, in place of an older one of its name."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class LocalWriter:
    """Writes beside the final place, then renames."""

    def __init__(self, path: str, part: str, store: str) -> None:
        self._path, self._part, self._store = Path(path), Path(part), store
        with translate(self._path.name, self._store):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file: BinaryIO = self._part.open("xb")

    def write(self, data: bytes) -> None:
        """Append."""
        with translate(self._path.name, self._store):
            self._file.write(data)

    def commit(self) -> None:
        """Let the blob appear, after its content is on the disk."""
        with translate(self._path.name, self._store):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._path)
            _sync_directory(self._path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with translate(self._path.name, self._store):
            self._file.close()
            self._part.unlink(missing_ok=True)


class RemoteWriter:
    """Gathers a blob on the local disk and sends it as a whole.

    Not every store can be told to forget what it was sent, and none notices a sender's death.
    """

    def __init__(self, fs: Any, path: str, store: str) -> None:
        self._fs, self._path, self._store = fs, path, store
        self._name = path.rpartition("/")[2]
        self._file = NamedTemporaryFile(prefix="tidemill-blob-")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Append."""
        with translate(self._name, self._store):
            self._file.write(data)

    def commit(self) -> None:
        """Let the blob appear."""
        try:
            with translate(self._name, self._store):
                self._file.flush()
                send(self._fs, self._file.name, self._path)
        except BlobNotFound as error:
            # A bucket is its owner's to make: it has a place, rights and a price.
            raise BlobError(
                f"the blob store {self._store} does not exist", fix="Create its bucket."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def _sync_directory(path: Path) -> None:
    # The rename itself must survive a loss of power.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
