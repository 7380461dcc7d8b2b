"""What an embedded server is told: its settings, its socket and its share of memory."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tidemill.protocol.errors import ConfigError
from tidemill.service.fsync_probe import FsyncPolicy

#: ``sockaddr_un`` holds 108 bytes on Linux and 104 on macOS, the final zero included.
_SOCKET_PATH_BYTES = 103
_SOCKET_NAME = "valkey.sock"
_SHORT_PARENT = Path("/tmp")
_MIN_MEMORY_BYTES = 256 * 1024 * 1024
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything an embedded server is started with; sizes in bytes."""

    data_dir: Path
    socket_path: Path
    port: int | None
    fsync: FsyncPolicy
    max_memory_bytes: int

    @property
    def url(self) -> str:
        """The address over the private socket."""
        return socket_url(self.socket_path)

    @property
    def tcp_url(self) -> str | None:
        """The address on the loopback interface, if a port was asked for."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else None

    def arguments(self) -> list[str]:
        """The server's command line after the name of the binary."""
        return [word for name, value in self._directives() for word in (f"--{name}", value)]

    def _directives(self) -> list[tuple[str, str]]:
        return [
            ("bind", "127.0.0.1"),
            ("port", str(self.port or 0)),
            ("unixsocket", str(self.socket_path)),
            ("unixsocketperm", "700"),
            ("dir", str(self.data_dir)),
            ("pidfile", str(self.data_dir / "valkey.pid")),
            ("daemonize", "no"),
            ("appendonly", "yes"),
            ("appendfsync", self.fsync),
            # A write cut short by a crash loses its own unacknowledged tail, not the whole file.
            ("aof-load-truncated", "yes"),
            ("save", ""),
            # Evicting a key would lose an accepted job; a refused submit loses nothing.
            ("maxmemory", str(self.max_memory_bytes)),
            ("maxmemory-policy", "noeviction"),
            # Token logs are many and short: a small stream costs 2.2 kB instead of 4.3 kB.
            ("stream-node-max-bytes", "1024"),
        ]


def default_max_memory_bytes() -> int:
    """A quarter of what the machine or container has: rewriting the log may copy all of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()).isdecimal():
        total = min(total, int(limit))
    return max(total // 4, _MIN_MEMORY_BYTES)


def socket_path_of(data_dir: Path) -> Path:
    """Where the server of ``data_dir`` has its socket: the same place in every process.

    A directory whose name is too long for a socket address gets a short one under /tmp, which
    unlike the XDG runtime directory outlives the user's session.
    """
    data_dir = data_dir.absolute()
    path = data_dir / "run" / _SOCKET_NAME
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return _SHORT_PARENT / f"tidemill-{os.getuid()}" / digest / _SOCKET_NAME


def socket_url(path: Path) -> str:
    """The address of the server behind the socket at ``path``, as redis-py takes it."""
    return f"unix://{quote(str(path))}"


def make_socket_directory(socket_path: Path) -> None:
    """Create the directory of a socket so that only this user may enter it.

    Raises ``ConfigError`` if another user was there first.
    """
    if socket_path.is_relative_to(_SHORT_PARENT / f"tidemill-{os.getuid()}"):
        _make_private(socket_path.parent.parent)
    _make_private(socket_path.parent)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if directory.is_symlink() or status.st_uid != os.getuid():
        raise ConfigError(
            f"the socket directory {directory} belongs to another user",
            fix="Remove it, or choose a data directory with a shorter path.",
        )
    directory.chmod(0o700)
