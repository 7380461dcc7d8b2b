"""The processes of a run: started, watched and replaced, and the broker they meet in."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.actors import Child, NurseryClient, Slot, environment, kill
from chaos.brokers import Brokers
from chaos.history import Recorder
from chaos.plan import (
    CRASH_POINTS,
    NUM_PRODUCERS,
    NUM_SCHEDULERS,
    NUM_WORKERS,
    OLD_VERSION,
    ROLES,
    Plan,
)
from chaos.process import ProcessSpec
from tidemill.service.runtime import CRASH_STATUS, ParentLink


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How a run differs from the normal one: a planted bug, another library, another durability."""

    patch: str = ""
    library: str = ""
    fsync: str = "always"
    #: A replica that can be promoted; a data directory of its own, such as a small disk.
    has_replica: bool = False
    data_dir: Path | None = None


@dataclass
class Actor:
    """One start of a process."""

    name: str
    slot: Slot
    process: Child
    is_paused: bool = False


class Proxy:
    """The proxy process and its ports."""

    def __init__(self, socket_path: Path) -> None:
        command = [sys.executable, "-m", "chaos.proxy", str(socket_path), *ROLES]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )
        assert self._process.stdout is not None
        self._ports = json.loads(self._process.stdout.readline())

    def url(self, role: str) -> str:
        """The broker's address for one kind of process."""
        return f"redis://127.0.0.1:{self._ports[role]}/0"

    def command(self, role: str, mode: str, seconds: float = 0.0) -> None:
        """Change the weather for one kind of process."""
        self._send({"role": role, "mode": mode, "seconds": seconds})

    def redirect(self, socket_path: Path) -> None:
        """Send new connections to another broker, and break the present ones."""
        for role in ROLES:
            self._send({"role": role, "mode": "upstream", "path": str(socket_path)})
            self.command(role, "reset")

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the proxy."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


class Stage:
    """Everything that runs; ``counts`` are the deaths so far by cause."""

    def __init__(self, plan: Plan, directory: Path, options: StageOptions) -> None:
        self.plan = plan
        self.directory = directory
        self.started = time.monotonic() + 2.0
        self.counts: Counter[str] = Counter()
        self.actors: dict[Slot, Actor] = {}
        self.finished: set[Slot] = set()
        self.recorder = Recorder(directory / "stage.jsonl")
        self._options = options
        self._rng = random.Random(f"stage-{plan.seed}")
        self._num_starts: Counter[Slot] = Counter()
        self._parent = ParentLink()
        self._nursery = NurseryClient(options.patch, options.library, self._parent.pass_fds)
        self.brokers = Brokers(
            directory,
            self.recorder,
            self.counts,
            fsync=options.fsync,
            has_replica=options.has_replica,
            data_dir=options.data_dir,
        )
        self.proxy = Proxy(self.brokers.socket_path)
        self.is_calm = False

    def open(self) -> None:
        """Start one process per slot."""
        counts = {"worker": NUM_WORKERS, "scheduler": NUM_SCHEDULERS, "producer": NUM_PRODUCERS}
        for role, count in counts.items():
            for index in range(count):
                self._start((role, index))

    def supervise(self) -> None:
        """Replace what has ended."""
        for slot, actor in list(self.actors.items()):
            status = actor.process.poll()
            if status is None:
                continue
            self._note_end(actor, status)
            del self.actors[slot]
            if slot[0] == "producer" and status == 0:
                self.finished.add(slot)
            else:
                self._start(slot)

    def kill(self, actor: Actor, cause: str) -> None:
        """SIGKILL, paused or not."""
        self.recorder.record("kill", name=actor.name, cause=cause, wall=time.time())
        kill(actor.process)

    def pause(self, actor: Actor) -> None:
        """Stop a process where it is."""
        self.recorder.record("pause", name=actor.name)
        actor.is_paused = True
        actor.process.send_signal(signal.SIGSTOP)

    def resume(self, actor: Actor) -> None:
        """Let a stopped process go on; it may have been killed meanwhile."""
        if actor.is_paused and actor.process.poll() is None:
            actor.is_paused = False
            actor.process.send_signal(signal.SIGCONT)
            self.recorder.record("resume", name=actor.name)

    def of_role(self, role: str) -> list[Actor]:
        """The living processes of a role."""
        return [
            actor
            for actor in self.actors.values()
            if actor.slot[0] == role and actor.process.poll() is None
        ]

    def promote(self) -> None:
        """Let the replica take the broker's place for good."""
        self.brokers.promote()
        self.proxy.redirect(self.brokers.socket_path)

    def calm(self) -> None:
        """End every fault: all processes run, all connections work."""
        self.is_calm = True
        for role in ROLES:
            self.proxy.command(role, "calm")
        for actor in list(self.actors.values()):
            self.resume(actor)
        self.brokers.settle()
        self.recorder.record("calm")

    def close(self) -> dict[str, int]:
        """Drain workers and schedulers; returns exit statuses by process name."""
        actors = list(self.actors.values())
        self.actors.clear()
        for actor in actors:
            actor.process.send_signal(signal.SIGTERM)
        statuses = {}
        for actor in actors:
            try:
                statuses[actor.name] = actor.process.wait(20)
            except subprocess.TimeoutExpired:
                kill(actor.process)
                statuses[actor.name] = actor.process.wait(10)
        return statuses

    def end(self) -> None:
        """End the proxy and the broker."""
        self._parent.close()
        self._nursery.close()
        self.proxy.close()
        self.brokers.close()
        self.recorder.close()

    def _note_end(self, actor: Actor, status: int) -> None:
        self.recorder.record("exit", name=actor.name, status=status, wall=time.time())
        role = actor.slot[0]
        if status == -signal.SIGKILL:
            self.counts[f"kill {role}"] += 1
        elif status == CRASH_STATUS:
            self.counts[f"crash {role}"] += 1
        elif status:
            self.counts[f"failed {role}"] += 1
        elif role != "producer":
            self.counts[f"left {role}"] += 1

    def _start(self, slot: Slot) -> None:
        role, index = slot
        self._num_starts[slot] += 1
        name = f"{role}{index}-{self._num_starts[slot]}"
        spec = ProcessSpec(
            name=name,
            role=role,
            index=index,
            url=self.proxy.url(role),
            directory=str(self.directory),
            seed=self.plan.seed,
            num_jobs=len(self.plan.jobs),
            seconds=self.plan.seconds,
            started=self.started,
            duplicate_share=self.plan.duplicate_share,
            skew_seconds=self._skew(),
            is_old=slot in OLD_VERSION and not self._options.library,
            patch=self._options.patch,
            library=self._options.library,
        )
        variables = self._variables(role)
        process = self._nursery.bear(
            spec, self._parent.environment | variables, self.directory / f"{name}.log"
        )
        self.actors[slot] = Actor(name, slot, process)
        self.recorder.record("start", name=name, skew=spec.skew_seconds, **variables)

    def _skew(self) -> float:
        skewed = self._rng.random() < self.plan.skew_share
        return self._rng.choice((-300.0, 300.0)) if skewed else 0.0

    def _variables(self, role: str) -> dict[str, str]:
        variables = {"TIDEMILL_CACHE_DIR": str(self.directory / "cache")}
        points = CRASH_POINTS.get(role, ())
        if points and not self.is_calm and self._rng.random() < self.plan.crash_share:
            point, number = self._rng.choice(points), self._rng.choice((1, 3, 10, 40))
            variables["TIDEMILL_CRASH_AT"] = f"{point}:{number}"
        return variables
