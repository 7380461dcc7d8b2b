"""The broker of a run: killed, restarted, its log cut short, its place taken by a replica."""

import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import redis

from chaos.history import Recorder
from support.nodes import free_port
from support.wait import wait_until
from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker import EmbeddedBroker
from tidemill.service.redis import connect

#: Enough for whatever a run keeps.
MAX_MEMORY_BYTES = 1 << 30

_WAIT_MS = 500
#: More than a run has jobs.
_BACK_DOOR_ENTRIES = 1_000_000


class Brokers:
    """The broker that serves now, and its replica if the run has one."""

    def __init__(
        self,
        directory: Path,
        recorder: Recorder,
        counts: Counter[str],
        *,
        fsync: str,
        has_replica: bool,
        data_dir: Path | None,
    ) -> None:
        self._directory = directory
        self._recorder = recorder
        self._counts = counts
        self._fsync = fsync
        self._lock = threading.Lock()
        self._retired: EmbeddedBroker | None = None
        self._synced = 0.0
        self.current = self._start(data_dir or directory / "data")
        self._set_up()
        self._replica = self._start_replica() if has_replica else None

    @property
    def url(self) -> str:
        """The address of the broker that serves now."""
        return self.current.url

    @property
    def socket_path(self) -> Path:
        """Its socket."""
        return self.current.settings.socket_path

    def connect(self) -> redis.Redis:
        """A client of the broker that serves now."""
        return connect(self.url)

    def kill(self, down_seconds: float) -> None:
        """SIGKILL the broker and start it again on the same data; returns at once."""
        if self._lock.acquire(blocking=False):
            self._note_kill(down=down_seconds)
            os.kill(self.current.pid, signal.SIGKILL)
            threading.Thread(target=self._restart, args=(down_seconds,)).start()

    def cut_log(self, sizes: dict[Path, int], since: float) -> None:
        """SIGKILL the broker, cut its log back to ``sizes``, which it had ``since``, restart it."""
        with self._lock:
            self._note_kill(cut=True)
            os.kill(self.current.pid, signal.SIGKILL)
            wait_until(lambda: not self.current.is_running)
            for path, size in sizes.items():
                if path.exists():
                    # Half an entry at the end, as a disk leaves it.
                    os.truncate(path, min(path.stat().st_size, size + 7))
            self._recorder.record("loss", since=since, until=time.monotonic())
            self.current.restart()

    def log_sizes(self) -> dict[Path, int]:
        """The append-only files and their sizes now."""
        return {path: path.stat().st_size for path in self._data_dir.rglob("*.aof")}

    def revive(self) -> None:
        """Start a broker again that has ended by itself."""
        with self._lock:
            if not self.current.is_running:
                self._counts["broker ended"] += 1
                self.current.restart()
                self._recorder.record("broker_up", load=0.0)

    def sync_replica(self) -> None:
        """Note what the replica has for sure: all that was accepted before this."""
        begun = time.monotonic()
        with self.connect() as client:
            # WAIT waits for the writes of its own connection, and so for all before them.
            client.set(f"{ShardKeys().prefix}chaos", "1", px=60_000)
            if client.wait(1, _WAIT_MS) >= 1:
                self._synced = begun

    def promote(self) -> None:
        """Kill the master for good and let the replica take its place."""
        assert self._replica is not None
        self._note_kill(promoted=True)
        os.kill(self.current.pid, signal.SIGKILL)
        self._retired, self.current, self._replica = self.current, self._replica, None
        with self.connect() as client:
            client.replicaof("NO", "ONE")
        self._recorder.record("loss", since=self._synced, until=time.monotonic())

    def settle(self) -> None:
        """Return when no restart is under way."""
        with self._lock:
            pass

    def close(self) -> None:
        """End every broker and remove its data."""
        for broker in (self.current, self._replica, self._retired):
            if broker is not None:
                broker.stop()
        for name in ("data", "replica"):
            shutil.rmtree(self._directory / name, ignore_errors=True)

    @property
    def _data_dir(self) -> Path:
        return self.current.settings.data_dir

    def _start(self, data_dir: Path) -> EmbeddedBroker:
        return EmbeddedBroker.start(
            data_dir,
            fsync=self._fsync,  # type: ignore[arg-type]
            max_memory_bytes=MAX_MEMORY_BYTES,
        )

    def _start_replica(self) -> EmbeddedBroker:
        replica = self._start(self._directory / "replica")
        port = free_port()
        with self.connect() as master, connect(replica.url) as client:
            master.config_set("port", port)
            client.replicaof("127.0.0.1", port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        self._synced = time.monotonic()
        return replica

    def _set_up(self) -> None:
        # Their bound follows the server's memory, which a fault of ours makes small for a while.
        settings = {"result_bytes": str(MAX_MEMORY_BYTES), "back:*": str(_BACK_DOOR_ENTRIES)}
        with self.connect() as client:
            client.hset(ShardKeys().settings, mapping=settings)

    def _note_kill(self, **fields: object) -> None:
        self._counts["kill redis"] += 1
        self._recorder.record("broker_kill", **fields)

    def _restart(self, down_seconds: float) -> None:
        try:
            # The time that it is away is the fault itself.
            time.sleep(down_seconds)
            begun = time.monotonic()
            self.current.restart()
            self._recorder.record("broker_up", load=round(time.monotonic() - begun, 3))
        finally:
            self._lock.release()
