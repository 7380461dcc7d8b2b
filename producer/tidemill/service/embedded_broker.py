"""A Valkey or Redis server that this process starts, owns and takes down with it."""

import logging
import re
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis
from redis import exceptions

from tidemill.protocol.errors import (
    BrokerRefused,
    BrokerUnavailable,
    BrokerUnsupported,
    ConfigError,
    PortInUse,
)
from tidemill.service.broker_binary import ServerBinary, find_server_binary
from tidemill.service.broker_config import (
    ServerSettings,
    default_max_memory_bytes,
    make_socket_directory,
    socket_path_of,
)
from tidemill.service.data_lock import DataDirectoryLock
from tidemill.service.fsync_probe import FsyncPolicy, measure_fsync_seconds, policy_for
from tidemill.service.redis import ServerInfo, check_server, connect, translate
from tidemill.service.server_process import STOP_GRACE_SECONDS, ServerProcess

_log = logging.getLogger(__name__)

#: ``fsync``: an acknowledged write survives power loss. ``fast``: the last two seconds may be lost.
#: ``none``: a restart loses everything. ``unknown``: the server does not say.
Durability = Literal["fsync", "fast", "none", "unknown"]

_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.01
_PROBE_TIMEOUT_SECONDS = 5.0
_LOG_NAME = "valkey.log"
_LOG_PREFIX = re.compile(r"^\d+:\w .*?\d\d:\d\d:\d\d\.\d+ ([.\-*#]) ")
#: Marks what a server tells as wrong; all other marks are of news.
_WARNING = "#"
#: The watcher's status is this and the number of the signal that ended the server.
_KILLED_STATUS = 128
_PROBE = """#!lua name=tm_probe
redis.register_function('tm_probe', function() return redis.status_reply('OK') end)
"""


class EmbeddedBroker:
    """A running server and the lock on its data directory; a context manager that stops it."""

    def __init__(self, binary: ServerBinary, settings: ServerSettings, lock: DataDirectoryLock):
        self._binary = binary
        self._lock = lock
        self._process: ServerProcess | None = None
        self._info: ServerInfo | None = None
        self.settings = settings

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int | None = None,
        fsync: FsyncPolicy | Literal["auto"] = "auto",
        max_memory_bytes: int | None = None,
        binary: ServerBinary | None = None,
    ) -> Self:
        """Start a server on ``data_dir`` and return once it serves, its old data loaded.

        ``fsync="auto"`` measures the disk. Raises ``BrokerNotFound``, ``DataDirectoryInUse``,
        ``PortInUse``, ``ConfigError`` or ``BrokerUnavailable``; nothing is left running then.
        """
        binary = binary or find_server_binary()
        data_dir = data_dir.absolute()
        lock = DataDirectoryLock(data_dir)
        lock.acquire(patience_seconds=STOP_GRACE_SECONDS)
        try:
            if port:
                _check_port(port)
            socket_path = socket_path_of(data_dir)
            make_socket_directory(socket_path)
            settings = ServerSettings(
                data_dir=data_dir,
                socket_path=socket_path,
                port=port,
                fsync=_choose_policy(data_dir) if fsync == "auto" else fsync,
                max_memory_bytes=max_memory_bytes or default_max_memory_bytes(),
            )
            broker = cls(binary, settings, lock)
            broker._launch()
        except BaseException:
            lock.release()
            raise
        return broker

    @property
    def url(self) -> str:
        """The address for redis-py, over the private socket."""
        return self.settings.url

    @property
    def durability(self) -> Durability:
        """What an accepted job survives."""
        return "fsync" if self.settings.fsync == "always" else "fast"

    @property
    def pid(self) -> int:
        """The server's own process id."""
        return self._running_info.pid

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version as numbers."""
        return self._running_info.version

    @property
    def is_running(self) -> bool:
        """Whether the server lives and has finished starting."""
        process = self._process
        return self._info is not None and process is not None and not process.has_exited()

    def restart(self) -> None:
        """Start a server that died again on the same data; a live one is stopped first.

        Raises what ``start`` raises, ``BrokerRefused`` if the server ended by itself, or
        ``OSError``.  Afterwards it may be called again.
        """
        self._end_process()
        if self.settings.port:
            _check_port(self.settings.port)
        self._launch()

    def stop(self) -> None:
        """End the server, its data flushed, and free the data directory; may be repeated."""
        self._end_process()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _running_info(self) -> ServerInfo:
        if self._info is None:
            raise BrokerUnavailable("the embedded server is stopped", fix="Start it again.")
        return self._info

    @property
    def _log_file(self) -> Path:
        return self.settings.data_dir / _LOG_NAME

    def _launch(self) -> None:
        if self._log_file.exists():
            self._log_file.replace(self._log_file.with_suffix(".log.1"))
        command = [str(self._binary.path), *self.settings.arguments()]
        self._process = ServerProcess(
            command, log_file=self._log_file, inherited_fds=(self._lock.fd,)
        )
        try:
            self._info = self._await_ready(self._process)
        except BaseException:
            self._end_process()
            raise

    def _await_ready(self, process: ServerProcess) -> ServerInfo:
        with connect(self.url, timeout_seconds=_PROBE_TIMEOUT_SECONDS, retries=0) as client:
            deadline = time.monotonic() + _CONNECT_SECONDS
            while (answer := ping(client)) != "ready":
                if process.has_exited(within_seconds=_POLL_SECONDS):
                    raise self._exit_at_start(process.exit_status)
                # Loading a large log may take minutes, but a loading server does answer.
                if answer == "loading":
                    deadline = time.monotonic() + _CONNECT_SECONDS
                if time.monotonic() > deadline:
                    reason = _last_words(self._log_file)
                    raise self._failure(BrokerUnavailable, f"does not answer: {reason}")
            info = check_server(client)
            with translate():
                _check_functions(client)
            return info

    def _exit_at_start(self, status: int) -> BrokerUnavailable:
        if status == 0 or status > _KILLED_STATUS or status < 0:
            # Its log ends wherever it was, so the last line has nothing to do with it.
            how = f"by signal {abs(status) % _KILLED_STATUS}" if status else "by a request to stop"
            return self._failure(BrokerUnavailable, f"was ended at start {how}")
        return self._failure(BrokerRefused, f"exited at start: {_last_words(self._log_file)}")

    def _failure(self, kind: type[BrokerUnavailable], what: str) -> BrokerUnavailable:
        return kind(f"the embedded server {what}", fix=f"Its full log is {self._log_file}.")

    def _end_process(self) -> None:
        process, self._process, self._info = self._process, None, None
        if process is not None:
            process.stop()
            # A killed server leaves its socket behind, which would look like a live one.
            self.settings.socket_path.unlink(missing_ok=True)


def _choose_policy(data_dir: Path) -> FsyncPolicy:
    try:
        seconds = measure_fsync_seconds(data_dir)
    except OSError as error:
        raise ConfigError(
            f"the data directory {data_dir} cannot be written: {error.strerror}",
            fix="Free some space there, or choose another directory with --data-dir.",
        ) from error
    policy = policy_for(seconds)
    if policy != "always":
        _log.warning(
            "an fsync in %s takes %.0f ms, too slow to sync every write: a crash may lose the last"
            " two seconds of accepted jobs",
            data_dir,
            seconds * 1000,
        )
    return policy


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        # As the server does: connections of its predecessor in TIME_WAIT must not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise PortInUse(
                f"port {port} on 127.0.0.1 cannot be used: {error}",
                fix="Choose another --broker-port, or leave it out for the private socket only.",
            ) from error


def ping(client: redis.Redis) -> Literal["ready", "loading", "silent"]:
    """Whether a server is there and what it is doing, as far as one round trip tells."""
    try:
        client.ping()
    except exceptions.BusyLoadingError:
        return "loading"
    except (exceptions.ConnectionError, exceptions.TimeoutError):
        return "silent"
    return "ready"


def _check_functions(client: redis.Redis) -> None:
    try:
        client.function_load(_PROBE, replace=True)
        client.fcall("tm_probe", 0)
        client.function_delete("tm_probe")
    except exceptions.OutOfMemoryError:
        # A server that was filled before it ended comes back full; then its jobs must drain.
        _log.warning("the server's memory is full: new jobs are refused until others have ended")
    except exceptions.ResponseError as error:
        raise BrokerUnsupported(
            f"the server cannot run functions: {error}",
            fix="Use Redis >= 7.0 or Valkey >= 7.2 with scripting enabled.",
        ) from error


def _last_words(log_file: Path) -> str:
    """The server's last complaint, behind which news of other things may have come."""
    lines = log_file.read_text("utf-8", "replace").split("\n")
    said = [line for line in lines if line.strip()] or ["it said nothing"]
    chosen = next((line for line in reversed(said) if _is_complaint(line)), said[-1])
    return _LOG_PREFIX.sub("", chosen)


def _is_complaint(line: str) -> bool:
    # Errors of the settings, and those of the system's loader, have no prefix.
    prefix = _LOG_PREFIX.match(line)
    return prefix is None or (prefix[1] == _WARNING and "WARNING" not in line)
