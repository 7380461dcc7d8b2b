"""Carries the faults of a plan out, and undoes those that end."""

import contextlib
import heapq
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable

from chaos.history import read_events
from chaos.plan import Fault
from chaos.stage import Actor, Stage
from tidemill.service.redis import connect

_ADMIN_TIMEOUT_SECONDS = 0.3


class Injector:
    """Breaks things in the order of the plan; ``turn`` does what is due."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._faults = list(stage.plan.faults)[::-1]
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._admin = connect(stage.broker.url, timeout_seconds=_ADMIN_TIMEOUT_SECONDS, retries=0)
        self._disk: subprocess.Popen[bytes] | None = None

    @property
    def is_done(self) -> bool:
        """Whether every fault of the plan has begun."""
        return not self._faults

    def turn(self) -> None:
        """Begin and end what is due."""
        now = time.monotonic()
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
        while self._faults and self._stage.started + self._faults[-1].at <= now:
            self._inject(self._faults.pop())

    def close(self) -> None:
        """End every fault that still lasts."""
        while self._undo:
            heapq.heappop(self._undo)[2]()
        self._stage.calm()
        self._restore_memory(patience_seconds=10.0)
        self._admin.close()

    def _inject(self, fault: Fault) -> None:
        self._stage.recorder.record(
            "fault", name=fault.name, role=fault.role, seconds=round(fault.seconds, 2)
        )
        self._stage.counts[f"fault {fault.name}"] += 1
        kind, _, rest = fault.name.partition("_")
        match kind, rest:
            case "kill", "redis":
                self._stage.kill_broker(fault.seconds)
            case "pause", "redis":
                self._pause_broker(fault.seconds)
            case "kill", role:
                if victim := self._victim(role, fault):
                    self._stage.kill(victim, "fault")
            case "pause", role:
                self._pause(self._victim(role, fault), fault.seconds)
            case "slow", _:
                self._load_disk(fault)
            case "oom", _:
                self._fill_memory(fault.seconds)
            case _:
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
        broker = self._stage.broker
        if not broker.is_running:
            return
        pid = broker.pid
        os.kill(pid, signal.SIGSTOP)
        self._later(seconds, lambda: _continue(pid))

    def _load_disk(self, fault: Fault) -> None:
        if self._disk is not None and self._disk.poll() is None:
            return
        scratch = self._stage.directory / "pressure"
        command = ["dd", "if=/dev/zero", f"of={scratch}", "bs=4M", "count=24", "conv=fsync"]
        self._disk = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._later(fault.seconds, lambda: self._end_disk(fault))

    def _end_disk(self, fault: Fault) -> None:
        if fault.choice % 2:
            self._stage.kill_broker(0.0)
        assert self._disk is not None
        self._disk.kill()
        self._disk.wait(10)
        (self._stage.directory / "pressure").unlink(missing_ok=True)

    def _fill_memory(self, seconds: float) -> None:
        # The broker may be away just now: then this fault finds no victim.
        with contextlib.suppress(Exception):
            used = int(self._admin.info("memory")["used_memory"])
            self._admin.config_set("maxmemory", used // 2)
            self._later(seconds, self._restore_memory)

    def _restore_memory(self, patience_seconds: float = 0.0) -> None:
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                limit = self._stage.broker.settings.max_memory_bytes
                self._admin.config_set("maxmemory", limit)
                return
            except Exception:
                if time.monotonic() > deadline:
                    # A restart restores it as well; else the next turn tries again.
                    if not patience_seconds:
                        self._later(0.3, self._restore_memory)
                    return
                time.sleep(0.05)

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + seconds, next(self._numbers), undo))


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
