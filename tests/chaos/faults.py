"""Carries the faults of a plan out, and undoes those that end."""

import contextlib
import heapq
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

from chaos.brokers import MAX_MEMORY_BYTES
from chaos.history import read_events
from chaos.plan import Fault
from chaos.stage import Actor, Stage
from tidemill.service.redis import connect

_ADMIN_TIMEOUT_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_CLOSE_SECONDS = 10.0
#: How much of the log is cut off: what was written in this time.
_CUT_SECONDS = 1.0


class Injector:
    """Breaks things in the order of the plan; ``turn`` does what is due."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._faults = list(stage.plan.faults)[::-1]
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._sizes: tuple[float, dict[Path, int]] = (0.0, {})
        self._turned = 0.0
        self._special: dict[str, Callable[[Fault], None]] = {
            "kill_redis": lambda fault: stage.brokers.kill(fault.seconds),
            "pause_redis": lambda fault: self._pause_broker(fault.seconds),
            "slow_fsync": self._load_disk,
            "oom": lambda fault: self._fill_memory(fault.seconds),
            "promote": lambda _: stage.promote(),
            "cut_log": lambda _: stage.brokers.cut_log(self._sizes[1], self._sizes[0]),
            "fill_disk": lambda fault: self._fill_disk(fault.seconds),
        }
        self._disk: subprocess.Popen[bytes] | None = None

    @property
    def is_done(self) -> bool:
        """Whether every fault of the plan has begun."""
        return not self._faults

    def turn(self) -> None:
        """Begin and end what is due."""
        now = time.monotonic()
        if now - self._turned > _CUT_SECONDS:
            self._turned = now
            self._look_back()
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
        while self._faults and self._stage.started + self._faults[-1].at <= now:
            self._inject(self._faults.pop())

    def close(self) -> None:
        """End every fault that still lasts."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._undo and time.monotonic() < deadline:
            heapq.heappop(self._undo)[2]()
        self._stage.brokers.revive()
        self._stage.calm()

    def _inject(self, fault: Fault) -> None:
        self._stage.recorder.record(
            "fault", name=fault.name, role=fault.role, seconds=round(fault.seconds, 2)
        )
        self._stage.counts[f"fault {fault.name}"] += 1
        kind, _, role = fault.name.partition("_")
        special = self._special.get(fault.name)
        if special is not None:
            special(fault)
        elif kind == "kill" and (victim := self._victim(role, fault)):
            self._stage.kill(victim, "fault")
        elif kind == "pause":
            self._pause(self._victim(role, fault), fault.seconds)
        elif kind != "kill":
            self._stage.proxy.command(fault.role, fault.name, fault.seconds)

    def _victim(self, role: str, fault: Fault) -> Actor | None:
        actors = [actor for actor in self._stage.of_role(role) if not actor.is_paused]
        if role == "scheduler" and fault.choice % 3 and (leader := self._leader(actors)):
            return leader
        return actors[fault.choice % len(actors)] if actors else None

    def _leader(self, actors: list[Actor]) -> Actor | None:
        leads = self._stage.directory / "leads.jsonl"
        names = [event["name"] for event in read_events(leads)] if leads.exists() else []
        return next((actor for actor in actors if names and actor.name == names[-1]), None)

    def _pause(self, victim: Actor | None, seconds: float) -> None:
        if victim is not None:
            self._stage.pause(victim)
            self._later(seconds, lambda: self._stage.resume(victim))

    def _pause_broker(self, seconds: float) -> None:
        broker = self._stage.brokers.current
        if not broker.is_running:
            return
        pid = broker.pid
        _signal(pid, signal.SIGSTOP)
        self._later(seconds, lambda: _signal(pid, signal.SIGCONT))

    def _load_disk(self, fault: Fault) -> None:
        if self._disk is not None and self._disk.poll() is None:
            return
        scratch = self._stage.directory / "pressure"
        command = ["dd", "if=/dev/zero", f"of={scratch}", "bs=4M", "count=24", "conv=fsync"]
        self._disk = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._later(fault.seconds, lambda: self._end_disk(fault))

    def _end_disk(self, fault: Fault) -> None:
        if fault.choice % 2:
            self._stage.brokers.kill(0.0)
        assert self._disk is not None
        self._disk.kill()
        self._disk.wait(10)
        (self._stage.directory / "pressure").unlink(missing_ok=True)

    def _look_back(self) -> None:
        """Note what a loss from now on would leave."""
        names = {fault.name for fault in self._faults}
        if "cut_log" in names:
            self._sizes = (time.monotonic(), self._stage.brokers.log_sizes())
        if "promote" in names:
            with contextlib.suppress(redis.RedisError):
                self._stage.brokers.sync_replica()

    def _fill_disk(self, seconds: float) -> None:
        ballast = self._stage.brokers.current.settings.data_dir / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 14))
        self._later(seconds, lambda: self._free_disk(ballast))

    def _free_disk(self, ballast: Path) -> None:
        ballast.unlink(missing_ok=True)
        # With ``appendfsync always`` a server that cannot write its log ends.
        self._stage.brokers.revive()

    def _fill_memory(self, seconds: float) -> None:
        # The broker may be away just now: then this fault finds no victim.
        with contextlib.suppress(redis.RedisError), self._admin() as client:
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", used // 2)
            self._later(seconds, self._restore_memory)

    def _restore_memory(self) -> None:
        try:
            with self._admin() as client:
                client.config_set("maxmemory", MAX_MEMORY_BYTES)
        except redis.RedisError:
            # A restart restores it as well.
            self._later(_RETRY_SECONDS, self._restore_memory)

    def _admin(self) -> redis.Redis:
        url = self._stage.brokers.url
        return connect(url, timeout_seconds=_ADMIN_TIMEOUT_SECONDS, retries=0)

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + seconds, next(self._numbers), undo))


def _signal(pid: int, number: int) -> None:
    # Another fault may have killed it a moment ago.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
