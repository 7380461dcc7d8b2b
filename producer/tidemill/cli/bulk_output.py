"""The output file of a bulk run: each finished line once, resumable after any stop."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tidemill.cli.bulk_input import LineKey
from tidemill.protocol.errors import ConfigError


class OutputFile:
    """Appends result lines; knows which input lines an earlier run finished.

    Failed lines of an earlier run are dropped when the file is opened, so that they are tried
    again; ``retries`` maps them to the jobs that failed.  ``run_id`` stays the same from the first
    start to the completion of a run, over any number of stops: it names the run's jobs.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._run_file = path.with_name(f".{path.name}.run")
        self.done: set[LineKey] = set()
        self.retries: dict[LineKey, str] = {}
        self._load()
        self.run_id = self._read_run_id()

    def write(self, row: dict[str, Any]) -> None:
        """Append one line; it is complete in the file or absent, even if we are killed."""
        # A lone surrogate is written as the JSON escape it came as.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")
        with _told(self._path):
            self._file.write(line + b"\n")
            self._file.flush()

    def complete(self) -> None:
        """Forget the run: the next one on this file computes everything that it lacks."""
        self._run_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Bring everything to the disk."""
        with _told(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _load(self) -> None:
        is_clean = True
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            row = self._row(number, line)
            if row is None or row.get("error") is not None:
                is_clean = False
                if row is not None:
                    self.retries[_key(row)] = str(row.get("job_id") or "")
            else:
                self.done.add(_key(row))
        if not is_clean:
            self._replace()

    def _row(self, number: int, line: bytes) -> dict[str, Any] | None:
        """Return a line's row, or None: a killed run may have torn the last line."""
        row = _parse(line)
        if row is None and line.endswith(b"\n"):
            raise ConfigError(
                f"the output {str(self._path)!r} was not written by a bulk run: see its line"
                f" {number}",
                fix="Choose another file with -o; nothing was changed.",
            )
        return row if line.endswith(b"\n") else None

    def _replace(self) -> None:
        # Through another file, so that a crash leaves the old or the new one, whole; it is locked
        # before it takes the name, so that no other run slips in between.
        temporary = self._path.with_name(f".{self._path.name}.new")
        with _told(self._path):
            fresh = temporary.open("w+b")
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            for line in self._file:
                row = _parse(line) if line.endswith(b"\n") else None
                if row is not None and row.get("error") is None:
                    fresh.write(line)
            fresh.flush()
            os.fsync(fresh.fileno())
            os.replace(temporary, self._path)
            self._file.close()
        self._file = fresh

    def _read_run_id(self) -> str:
        with _told(self._path):
            if not self._run_file.exists():
                self._run_file.write_text(secrets.token_hex(16))
            return self._run_file.read_text()


@contextmanager
def open_output(path: Path, input_path: Path | None = None) -> Iterator[OutputFile]:
    """Open an output file for one run.

    Raises ``ConfigError``, with the file untouched, if it is the input, if another run writes to
    it, or if it holds anything but a bulk run's output.
    """
    if input_path is not None and path.exists() and path.samefile(input_path):
        raise ConfigError(
            f"the output {str(path)!r} is the input itself", fix="Choose another with -o."
        )
    if path.exists() and not path.is_file():
        raise ConfigError(f"the output {str(path)!r} is no file", fix="Choose another with -o.")
    with _told(path):
        file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        output = OutputFile(path, file)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"another run writes to {str(path)!r}", fix="Wait for it, or choose another file."
        ) from error
    except BaseException:
        file.close()
        raise
    try:
        yield output
    finally:
        output.close()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise ``ConfigError`` in place of what the operating system says of the output."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the output {str(path)!r} cannot be written: {error.strerror}",
            fix="Make room or choose another with -o; finished lines are not computed again.",
        ) from error


def _key(row: dict[str, Any]) -> LineKey:
    return int(row["line"]), str(row["custom_id"])


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(row, dict) and {"custom_id", "line", "job_id"} <= row.keys()
    return row if is_ours and isinstance(row["line"], int) else None
