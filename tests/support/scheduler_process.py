"""Scheduler daemons as processes of their own, with leases short enough for tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from support.wait import wait_until
from tidemill.protocol.keys import ShardKeys

LEASE_SECONDS = 1.0
LEADER_LEASE_SECONDS = 1.0
#: How long a test waits for what must happen: a lease, and patience with a slow machine.
LIVENESS_SECONDS = LEASE_SECONDS + 30


@dataclass
class SchedulerProcess:
    """A daemon under test."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        """What it wrote to standard error."""
        return self.log_path.read_text()

    def kill(self) -> None:
        """End it without any clean-up, whether it is stopped or not."""
        self.process.kill()
        self.process.wait(LIVENESS_SECONDS)

    def pause(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def drain(self) -> int:
        """Ask it to leave; returns its exit status."""
        self.process.terminate()
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
    command = [sys.executable, "-m", "tidemill_scheduler", "--redis-url", redis_url]
    command += ["--lease-seconds", str(lease_seconds)]
    command += ["--leader-lease-seconds", str(LEADER_LEASE_SECONDS), *options]
    environment = os.environ | {
        "TIDEMILL_CRASH_AT": crash_at,
        "TIDEMILL_CACHE_DIR": str(log_path.parent / "cache"),
        "TIDEMILL_LOG_LEVEL": "DEBUG",
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stderr=log)
    return SchedulerProcess(process, log_path)


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
