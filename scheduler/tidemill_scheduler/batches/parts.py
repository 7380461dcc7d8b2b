"""Parts of a batch's output: written whole, counted once, put together at the end."""

import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO

from tidemill.protocol.batches import BatchUsage
from tidemill.protocol.files import file_blob, part_blobs
from tidemill.protocol.keys import ShardKeys
from tidemill.service.blobs.store import BlobStore
from tidemill.service.blobs.writers import BlobWriter
from tidemill_scheduler.batches.lease import BatchName
from tidemill_scheduler.batches.line_jobs import Told

#: Of a part's output that stays in memory while the part is worked on.
_SPOOL_BYTES = 1 << 18
_COPY_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class PartCounts:
    """Lines of a part in the output and in the error file."""

    number: int
    num_answered: int
    num_failed: int


@dataclass
class Part:
    """The lines of one part as they come; on the local disk once they are many."""

    number: int
    num_answered: int = 0
    num_failed: int = 0
    usage: BatchUsage = field(default_factory=BatchUsage)
    #: Numbers of the lines that are in it.
    told: set[int] = field(default_factory=set)
    #: Held by whoever reads its lines: a thread goes on though its task was cancelled.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.answers = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115
        self.errors = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115

    def add(self, told: Told) -> None:
        """Take a line."""
        self.told.add(told.number)
        self.usage += told.usage
        if told.is_answer:
            self.num_answered += 1
            self.answers.write(told.data)
        else:
            self.num_failed += 1
            self.errors.write(told.data)

    def close(self) -> None:
        """Forget the lines."""
        self.answers.close()
        self.errors.close()


class OutputBlobs:
    """The output of one batch in the blob store; all calls block and may be repeated."""

    def __init__(self, blobs: BlobStore, keys: ShardKeys, name: BatchName) -> None:
        self._blobs, self._keys, self._name = blobs, keys, name
        self._prefix = part_blobs(keys, name.tenant, name.batch_id)

    def write_part(self, part: Part) -> None:
        """Put the lines of a part into the store."""
        for kind, lines, num in (
            ("out", part.answers, part.num_answered),
            ("err", part.errors, part.num_failed),
        ):
            if num:
                with part.lock:
                    lines.seek(0)
                    self._write(self._part(part.number, kind), [lines])

    def assemble(self, file_id: str, numbers: Sequence[int], kind: str) -> int:
        """Join the parts of a kind ("out" or "err") in a file; returns its size in bytes."""
        name = file_blob(self._keys, self._name.tenant, file_id)
        with self._blobs.writer(name) as writer:
            num_bytes = 0
            for number in numbers:
                with self._blobs.reader(self._part(number, kind)) as lines:
                    num_bytes += _copy(lines, writer)
            writer.commit()
        return num_bytes

    def clear(self) -> None:
        """Delete the parts."""
        self._blobs.delete(self._prefix)

    def _write(self, name: str, sources: Iterable[IO[bytes]]) -> None:
        with self._blobs.writer(name) as writer:
            for source in sources:
                shutil.copyfileobj(source, writer, _COPY_BYTES)
            writer.commit()

    def _part(self, number: int, kind: str) -> str:
        return f"{self._prefix}/{number:06d}.{kind}"


def _copy(source: IO[bytes], writer: BlobWriter) -> int:
    num_bytes = 0
    while data := source.read(_COPY_BYTES):
        writer.write(data)
        num_bytes += len(data)
    return num_bytes
