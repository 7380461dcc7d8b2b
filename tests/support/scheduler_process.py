"""Scheduler daemons as processes of their own, with leases short enough for tests."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import redis

from support.actors import fork
from support.wait import wait_until
from tidemill.protocol.keys import ShardKeys

LEASE_SECONDS = 1.0
LEADER_LEASE_SECONDS = 1.0
#: How long a test waits for what must happen: a lease, and patience with a slow machine.
LIVENESS_SECONDS = LEASE_SECONDS + 30


class DaemonProcess:
    """A forked process, handled as those of ``subprocess`` are."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it lives."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Wait for its end; returns its exit status."""
        self._process.join(seconds)
        status = self.poll()
        assert status is not None, f"the daemon has not ended after {seconds} s"
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass
class SchedulerProcess:
    """A daemon under test."""

    process: DaemonProcess
    log_path: Path

    @property
    def log(self) -> str:
        """What it wrote."""
        return self.log_path.read_text()

    def kill(self) -> None:
        """End it without any clean-up, whether it is stopped or not."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIVENESS_SECONDS)

    def pause(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def drain(self) -> int:
        """Ask it to leave; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIVENESS_SECONDS)


StartScheduler = Callable[..., SchedulerProcess]


def spawn_scheduler(
    redis_url: str,
    log_path: Path,
    *,
    crash_at: str = "",
    lease_seconds: float = LEASE_SECONDS,
    options: tuple[str, ...] = (),
) -> SchedulerProcess:
    """Start a daemon that dies at the crash point ``crash_at`` if one is named."""
    arguments = ["--redis-url", redis_url, "--lease-seconds", str(lease_seconds)]
    arguments += ["--leader-lease-seconds", str(LEADER_LEASE_SECONDS), *options]
    environment = os.environ | {
        "TIDEMILL_CRASH_AT": crash_at,
        "TIDEMILL_CACHE_DIR": str(log_path.parent / "cache"),
        "TIDEMILL_DATA_DIR": str(log_path.parent / "data"),
        "TIDEMILL_LOG_LEVEL": "DEBUG",
    }
    log_path.write_bytes(b"")
    process = fork("tidemill_scheduler.__main__:main", [arguments], environment, log_path)
    return SchedulerProcess(DaemonProcess(process), log_path)


def wait_for_standby(client: redis.Redis) -> None:
    """Wait until a standby has looked for the leader a few times from now on."""
    client.config_resetstat()

    def num_looks() -> int:
        # Nobody but a standby asks who listens.
        stats = client.info("commandstats")
        return int(stats.get("cmdstat_pubsub|shardnumsub", {}).get("calls", 0))

    wait_until(lambda: num_looks() > 2, LIVENESS_SECONDS, "no scheduler stands by")


def wait_for_leader(client: redis.Redis, *, above_epoch: int = 0, shard: str = "00") -> int:
    """Wait until some daemon leads in a later epoch; returns that epoch."""
    keys = ShardKeys(shard)

    def epoch() -> int:
        current = int(client.get(keys.epoch) or 0)
        return current if current > above_epoch and client.exists(keys.leader) else 0

    return wait_until(epoch, LIVENESS_SECONDS, "no scheduler leads")
