"""The lock that keeps two servers from writing one data directory."""

import fcntl
import os
import time
from pathlib import Path

from tidemill.protocol.errors import ConfigError, DataDirectoryInUse

_LOCK_NAME = "tidemill.lock"
_POLL_SECONDS = 0.05


class DataDirectoryLock:
    """An exclusive ``flock`` on a data directory.

    The server inherits ``fd``, and the kernel drops the lock when the last holder of that open
    file is gone: a launcher killed while its server still flushes keeps the directory locked.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.fd = _open(data_dir)

    def acquire(self, *, patience_seconds: float) -> None:
        """Take the lock, or raise ``DataDirectoryInUse`` naming the holder.

        Waits up to ``patience_seconds`` only if the launcher that took it is already dead, that
        is, while its server shuts down.
        """
        deadline = time.monotonic() + patience_seconds
        while not self._try():
            holder = self._holder()
            if _is_alive(holder) or time.monotonic() > deadline:
                self.release()
                raise _in_use(self.data_dir, holder)
            time.sleep(_POLL_SECONDS)  # flock has no timeout, and nothing announces a release
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock up, unless a server that inherited it still lives; may be repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self.release()
            raise ConfigError(
                f"the data directory {self.data_dir} cannot be locked: {error.strerror}",
                fix="Put it on a local disk with --data-dir or TIDEMILL_DATA_DIR.",
            ) from error
        return True

    def _holder(self) -> int:
        text = os.pread(self.fd, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else 0


def _open(data_dir: Path) -> int:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(data_dir / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the data directory {data_dir} cannot be used: {error.strerror}",
            fix="Name a writable directory with --data-dir or TIDEMILL_DATA_DIR.",
        ) from error


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _in_use(data_dir: Path, holder: int) -> DataDirectoryInUse:
    who = f"process {holder}" if holder else "another process"
    return DataDirectoryInUse(
        f"the data directory {data_dir} is in use by {who}",
        fix="Stop that process, or choose another directory with --data-dir or TIDEMILL_DATA_DIR.",
    )
