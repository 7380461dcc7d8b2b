"""The output file of a bulk run: each finished line once, resumable after any stop."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tidemill.cli.bulk_input import LineKey
from tidemill.protocol.errors import ConfigError


class OutputFile:
    """Appends result lines; knows which input lines an earlier run finished.

    Failed lines of an earlier run are dropped when the file is opened, so that they are tried
    again; ``retries`` maps them to the jobs that failed.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.done: set[LineKey] = set()
        self.retries: dict[LineKey, str] = {}
        self._load()

    def write(self, row: dict[str, Any]) -> None:
        """Append one line; it is complete in the file or absent, even if we are killed."""
        # A lone surrogate is written as the JSON escape it came as.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self._file.write(line + b"\n")
        self._file.flush()

    def _load(self) -> None:
        self._file.seek(0)
        num_dropped = 0
        for line in self._file:
            row = _row(line)
            if row is None or row.get("error") is not None:
                num_dropped += 1
                if row is not None:
                    self.retries[_key(row)] = str(row.get("job_id") or "")
            else:
                self.done.add(_key(row))
        if num_dropped:
            self._drop_unfinished()
        self._file.seek(0, os.SEEK_END)

    def _drop_unfinished(self) -> None:
        # In place, for the lock is on this very file: a line lost to a crash here is computed
        # again, or found by its idempotency key.
        self._file.seek(0)
        kept = [line for line in self._file if (row := _row(line)) and row.get("error") is None]
        self._file.seek(0)
        self._file.truncate()
        self._file.writelines(kept)
        self._file.flush()


@contextmanager
def open_output(path: Path) -> Iterator[OutputFile]:
    """Open an output file for one run; raises ``ConfigError`` if another run writes to it."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(
            f"the output {str(path)!r} cannot be written: {error.strerror}",
            fix="Choose another with -o.",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run writes to {str(path)!r}", fix="Wait for it, or choose another file."
            ) from error
        yield OutputFile(file)
        os.fsync(file.fileno())


def _key(row: dict[str, Any]) -> LineKey:
    return int(row["line"]), str(row["custom_id"])


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a complete line, or None: a killed run may have torn the last one."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"custom_id", "line"} <= row.keys() else None
