"""The models that are made once and kept in the user's cache, by one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.demo.demo_progress import ProgressReport


@contextmanager
def writable(cache_dir: Path) -> Iterator[None]:
    """Make the directory for models; raises ``ConfigError`` if it cannot be written in the body."""
    try:
        (cache_dir / "models").mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache directory {cache_dir} cannot be used: {error.strerror or error}",
            fix="Set TIDEMILL_CACHE_DIR to a writable directory with 500 MB to spare.",
        ) from error


@contextmanager
def lock(path: Path, report: ProgressReport, waiting: str) -> Iterator[None]:
    """Hold the lock file at ``path``; tells ``waiting`` if another process has it.

    The kernel drops the lock if its holder is killed; what that left half-made is a scratch
    directory beside the model, never the model.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.phase(waiting)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
