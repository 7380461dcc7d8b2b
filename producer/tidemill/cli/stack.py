"""A whole Tidemill on one machine: broker, scheduler and workers, kept alive together."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis

from tidemill.cli.broker_watch import BrokerWatch
from tidemill.cli.child import Child, ChildSpec
from tidemill.cli.gateway_options import GatewayOptions
from tidemill.cli.restarts import Restarts
from tidemill.protocol.errors import BrokerUnavailable, ConfigError
from tidemill.protocol.functions import ensure_library
from tidemill.protocol.keys import ShardKeys
from tidemill.service.broker import BrokerHandle, resolve_broker
from tidemill.service.fsync_probe import FsyncPolicy
from tidemill.service.redis import connect, translate
from tidemill.service.runtime import ParentLink, StopSignal

_log = logging.getLogger(__name__)

#: Exit status by which a process says that starting it again would not help.
CONFIG_STATUS = 2

_READY_TIMEOUT_SECONDS = 300.0
_POLL_SECONDS = 0.1
#: What a worker may take beyond its drain to hand back its jobs and say goodbye.
_FAREWELL_SECONDS = 15.0
_KILL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to run; ``worker_args`` go to every worker unchanged.

    On stop a worker may finish its jobs for ``drain_seconds``, then it hands them back.
    """

    redis_url: str | None
    data_dir: Path
    port: int | None = None
    fsync: FsyncPolicy | Literal["auto"] = "auto"
    shard: str = "00"
    num_workers: int = 1
    drain_seconds: float = 30.0
    worker_args: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()
    gateway: GatewayOptions | None = None
    environment: tuple[tuple[str, str], ...] = ()


class Stack:
    """Starts everything, starts again what dies, and stops everything in order.

    A context manager: inside, all workers are ready; afterwards nothing it started is left.
    ``sink`` receives every line that the processes print; ``on_failure`` is called, on another
    thread, when one of them cannot be kept alive.
    """

    def __init__(
        self,
        options: StackOptions,
        *,
        sink: Callable[[str], None],
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._options = options
        self._sink = sink
        self._on_failure = on_failure
        self._link = ParentLink()
        self._stopping = StopSignal()
        self._exits: queue.Queue[Child | None] = queue.Queue()
        self._children: dict[str, Child] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._broker: BrokerHandle | None = None
        self._ready = False
        #: Set when a process cannot be kept alive; the reason to give up.
        self.failure: str | None = None
        self.failed = StopSignal()

    @property
    def url(self) -> str:
        """The broker's address."""
        assert self._broker is not None, "the stack is not started"
        return self._broker.url

    @property
    def durability(self) -> str:
        """What an accepted job survives: fsync, fast, none or unknown."""
        assert self._broker is not None, "the stack is not started"
        return self._broker.durability

    def pids(self, kind: str) -> list[int]:
        """Return the ids of living processes: worker, scheduler, gateway or (own) broker."""
        if kind == "broker":
            embedded = self._broker.embedded if self._broker else None
            return [embedded.pid] if embedded and embedded.is_running else []
        with self._lock:
            children = [c for name, c in sorted(self._children.items()) if name.startswith(kind)]
        return [child.pid for child in children if child.exit_status is None]

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_ready()
            self._ready = True
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain gateway, workers, scheduler, broker in turn; bounded, and may be repeated."""
        if self._stopping.is_set:
            return
        with self._lock:
            self._stopping.set()
        try:
            # Its answers come from the workers, which therefore go on meanwhile.
            self._stop_children("gateway")
            self._stop_children("worker")
            self._stop_children("")
        except BaseException:
            # Interrupted while draining: leave at once, but leave nothing behind.
            self._kill_children()
            raise
        finally:
            self._exits.put(None)
            for thread in self._threads:
                thread.join()
            if self._broker is not None:
                self._broker.stop()
            self._link.close()

    def _start(self) -> None:
        options = self._options
        self._broker = resolve_broker(
            options.redis_url,
            options.data_dir,
            options.port,
            fsync=options.fsync,
            shard=options.shard,
        )
        with connect(self.url, shard=self._options.shard) as client:
            ensure_library(client)
        for spec in self._specs():
            self._spawn(spec)
        self._run_thread(self._supervise, "supervisor")
        if self._broker.embedded is not None:
            watch = BrokerWatch(self._broker.embedded, self._stopping, self._give_up)
            self._run_thread(watch.run, "broker-watch")

    def _specs(self) -> list[ChildSpec]:
        options = self._options
        # In the environment, not as an argument: that would show its password to everybody.
        environment = {
            **dict(options.environment),
            "TIDEMILL_REDIS_URL": self.url,
            "TIDEMILL_SHARD": options.shard,
            # Files lie beside the broker's data.
            "TIDEMILL_DATA_DIR": str(options.data_dir),
        }
        scheduler = ChildSpec(
            "scheduler", "tidemill_scheduler", options.scheduler_args, environment
        )
        workers = [
            ChildSpec(
                f"worker-{number}",
                "tidemill_gpuworker",
                ("--drain-seconds", f"{options.drain_seconds:g}", *options.worker_args),
                environment,
            )
            for number in range(1, options.num_workers + 1)
        ]
        if options.gateway is None:
            return [scheduler, *workers]
        return [scheduler, *workers, options.gateway.spec(options.drain_seconds, environment)]

    def _spawn(self, spec: ChildSpec) -> None:
        with self._lock:
            if self._stopping.is_set:
                return
            child = Child(spec, self._link, sink=self._sink, on_exit=self._exits.put)
            self._children[spec.name] = child
        _log.info("started %s, pid %d", spec.name, child.pid)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        keys, gateway = ShardKeys(self._options.shard), self._options.gateway
        with connect(self.url, shard=self._options.shard) as client:
            while not self.failed.wait(_POLL_SECONDS):
                is_gateway_up = gateway is None or gateway.is_listening()
                if _num_live_workers(client, keys) >= self._options.num_workers and is_gateway_up:
                    return
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"the workers are not ready after {_READY_TIMEOUT_SECONDS:.0f} s",
                        fix="See the log lines above, or use a smaller model.",
                    )
        raise ConfigError(self.failure or "a process ended before it was ready")

    def _supervise(self) -> None:
        restarts = Restarts()
        while not self._stopping.is_set:
            try:
                child = self._exits.get(timeout=restarts.next_in_seconds())
            except queue.Empty:
                for spec in restarts.take_due():
                    self._spawn(spec)
                continue
            if child is not None and not self._stopping.is_set and not self.failed.is_set:
                self._bury(child, restarts)

    def _bury(self, child: Child, restarts: Restarts) -> None:
        if not self._ready or child.exit_status == CONFIG_STATUS:
            self._give_up(child.complaint)
            return
        _log.warning("starting %s again: %s", child.spec.name, child.complaint)
        restarts.died(child.spec)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self.failed.set()
        if self._on_failure is not None:
            self._on_failure()

    def _run_thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name)
        self._threads.append(thread)
        thread.start()

    def _stop_children(self, prefix: str) -> None:
        with self._lock:
            children = [c for n, c in self._children.items() if n.startswith(prefix)]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._options.drain_seconds + _FAREWELL_SECONDS
        for child in children:
            if not child.wait(max(0.0, deadline - time.monotonic())):
                child.kill()
                child.wait(_KILL_SECONDS)

    def _kill_children(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait(_KILL_SECONDS)


def _num_live_workers(client: redis.Redis, keys: ShardKeys) -> int:
    try:
        with translate():
            seconds, micros = client.time()
            now_ms = int(seconds) * 1000 + int(micros) // 1000
            return int(client.zcount(keys.workers, now_ms, "+inf"))
    except BrokerUnavailable:
        # Its watch starts it again, or tells why not.
        return 0
