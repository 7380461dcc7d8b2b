"""A whole worker: its threads and connections, from registration to the last release."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from tidemill.protocol.calls import RetryPause
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import CommandKind
from tidemill.service.redis import SOCKET_TIMEOUT_SECONDS, check_server, connect, translate
from tidemill.service.runtime import Drain
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.background import Background
from tidemill_gpuworker.shell.backoff import LAST_SECONDS
from tidemill_gpuworker.shell.claims import ClaimLoader
from tidemill_gpuworker.shell.commands import BLOCK_MS, CommandReader, parse_command
from tidemill_gpuworker.shell.heartbeat import Heartbeat
from tidemill_gpuworker.shell.inbox import Claimed, DrainAsked, Inbox, Lost, ThreadDied, Woken
from tidemill_gpuworker.shell.intake import Intake
from tidemill_gpuworker.shell.job_runner import JobRunner
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbound import Outbound
from tidemill_gpuworker.shell.outbox import PublishPolicy
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.shell.registration import Registration
from tidemill_gpuworker.shell.releaser import Releaser
from tidemill_gpuworker.shell.status import StatusReporter
from tidemill_gpuworker.shell.work_clock import WorkClock
from tidemill_gpuworker.shell.worker import Parts, Worker
from tidemill_gpuworker.structured_output.desk import GrammarDesk

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Broker and times of a worker process, in seconds."""

    redis_url: str
    shard: str = "00"
    lease_seconds: float = 10.0
    beat_seconds: float = 3.0
    max_step_seconds: float = 60.0
    drain_seconds: float = 30.0
    #: How long leaving may take once nothing runs: the broker may be away.
    farewell_seconds: float = 10.0
    #: How often the directory of adapters is looked into.
    rescan_seconds: float = 2.0
    retry: RetryPause = field(default_factory=RetryPause)
    policy: PublishPolicy = field(default_factory=PublishPolicy)

    @property
    def reply_seconds(self) -> float:
        """How long a reply may take: a dead connection must leave time to try another one."""
        return min(SOCKET_TIMEOUT_SECONDS, self.lease_seconds / 3)

    @property
    def max_delay_seconds(self) -> float:
        """The longest wait for a broker that is away: once back it must hear us within a lease."""
        return min(LAST_SECONDS, self.lease_seconds / 4)

    @property
    def block_ms(self) -> int:
        """How long the server may wait for commands, well within ``reply_seconds``."""
        return min(BLOCK_MS, int(self.reply_seconds * 500))


class WorkerProcess:
    """Wires the parts of a worker and runs them to the end of a drain.

    Four threads: the step loop (the caller's, which never waits for the broker), the command
    reader, the writer of everything, and the heartbeat. The order of leaving: read no more
    commands, stop the engine, write what it generated, give back what is unfinished, stop the
    heartbeat, deregister, give back what was dispatched meanwhile.
    """

    def __init__(self, model: ServedModel, config: ProcessConfig) -> None:
        self._config = config
        self._ranks = model.ranks
        self._client = self._connect(model.info.worker_id)
        self._beat_client = self._connect(f"{model.info.worker_id}-beat")
        self._keys = ShardKeys(config.shard)
        self._inbox = Inbox()
        self._jobs = JobTable()
        self._registration = Registration(
            client=self._beat_client,
            keys=self._keys,
            info=model.info,
            card=model.card,
            tokenizer=model.tokenizer.to_bundle(),
            lease_ms=int(config.lease_seconds * 1000),
            adapters=model.adapters,
        )
        self._loop_clock, self._reader_clock = WorkClock(), WorkClock()
        self._wire_inbound(model)
        self._wire_outbound(model)
        self._wire_engine(model)
        self._threads = {
            "commands": self._background("commands", self._reader.read),
            "outbound": self._background("outbound", self._outbound.turn, self._alarm.ring),
            "heartbeat": self._background("heartbeat", self._beat),
        }
        if model.adapters is not None:
            self._adapters = model.adapters
            self._threads["adapters"] = self._background("adapters", self._look_for_adapters)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine and the reader of commands get on."""
        return not self._heartbeat.hangs

    def run(self, drain: Drain, on_ready: Callable[[], None] = lambda: None) -> bool:
        """Register, work until ``drain`` asks to stop, and leave; True if nothing was left open.

        Raises what the broker refuses a worker for, and what killed one of the threads.
        """
        check_server(self._client)
        # A server that loads its data answers the check and nothing else.
        with translate():
            self._registration.register()
        watch = threading.Thread(target=self._watch, args=(drain,), name="drain", daemon=True)
        watch.start()
        for thread in self._threads.values():
            thread.start()
        on_ready()
        if self._ranks is not None:
            self._ranks.watch(self._died)
        try:
            self._worker.run()
        finally:
            done = self._leave()
            drain.request()
            drain.request()
            watch.join()
        return done

    def _connect(self, client_name: str) -> redis.Redis:
        # One repetition on a new connection; after that the threads have delays of their own.
        return connect(
            self._config.redis_url,
            shard=self._config.shard,
            client_name=client_name,
            timeout_seconds=self._config.reply_seconds,
            retries=1,
        )

    def _background(
        self, name: str, turn: Callable[[], None], wake: Callable[[], None] = lambda: None
    ) -> Background:
        delay = self._config.max_delay_seconds
        return Background(name, turn, self._died, wake, max_delay_seconds=delay)

    def _wire_inbound(self, model: ServedModel) -> None:
        self._loader = ClaimLoader(
            self._client,
            self._keys,
            model.info.worker_id,
            model.card,
            model.tokenizer,
            self._reader_clock,
            kinds=model.kinds,
            adapters=model.adapters,
        )
        self._reader = CommandReader(
            self._client,
            self._keys.commands(model.info.worker_id),
            Intake(self._loader, self._jobs, self._inbox),
            block_ms=self._config.block_ms,
        )

    def _wire_outbound(self, model: ServedModel) -> None:
        alarm = Alarm()
        self._publisher = Publisher(
            self._client,
            self._keys,
            model.info.worker_id,
            self._jobs,
            alarm,
            on_lost=self._lost,
            on_room=lambda: self._inbox.put(Woken()),
            policy=self._config.policy,
        )
        self._releaser = Releaser(
            self._client,
            self._keys,
            model.info.worker_id,
            self._jobs,
            alarm,
            pause=self._config.retry,
        )
        self._status = StatusReporter(self._client, self._keys, model.info.worker_id, alarm)
        self._outbound = Outbound(alarm, self._publisher, self._status, self._releaser)
        self._alarm = alarm

    def _wire_engine(self, model: ServedModel) -> None:
        self._grammars = model.grammars
        self._runner = JobRunner(
            model.engine,
            self._publisher,
            self._releaser.nack,
            grammars=GrammarDesk(model.grammars, wake=lambda: self._inbox.put(Woken())),
            kinds=model.kinds,
        )
        self._heartbeat = Heartbeat(
            self._beat_client,
            self._registration,
            self._jobs,
            (self._loop_clock, self._reader_clock),
            max_step_seconds=self._config.max_step_seconds,
            on_lost=self._lost,
        )
        parts = Parts(
            engine=model.engine,
            runner=self._runner,
            jobs=self._jobs,
            inbox=self._inbox,
            publisher=self._publisher,
            releaser=self._releaser,
            status=self._status,
            clock=self._loop_clock,
        )
        self._worker = Worker(
            parts,
            drain_seconds=self._config.drain_seconds,
            idle_seconds=self._config.beat_seconds,
        )

    def _beat(self) -> None:
        self._heartbeat.beat()
        self._threads["heartbeat"].wait(self._config.beat_seconds)

    def _look_for_adapters(self) -> None:
        self._threads["adapters"].wait(self._config.rescan_seconds)
        if self._adapters.rescan():
            _log.info("adapters: %s", ", ".join(card.name for card in self._adapters.cards))
            self._registration.register()

    def _lost(self, job: Job) -> None:
        self._inbox.put(Lost(job))

    def _died(self, error: Exception) -> None:
        self._inbox.put(ThreadDied(error))

    def _watch(self, drain: Drain) -> None:
        drain.draining.wait()
        self._inbox.put(DrainAsked())
        drain.stopping.wait()
        self._inbox.put(DrainAsked(now=True))

    def _leave(self) -> bool:
        self._threads["commands"].close()
        with self._loop_clock.working():
            unfinished = self._stop_engine()
        if self._grammars is not None:
            self._grammars.close()
        self._threads["outbound"].close()
        deadline = time.monotonic() + self._config.farewell_seconds
        self._write_all(deadline)
        for job in unfinished:
            self._releaser.release(job)
        self._write_all(deadline)
        if "adapters" in self._threads:
            self._threads["adapters"].close()
        self._threads["heartbeat"].close()
        done = self._deregister(deadline) and not self._outbound.has_work
        if not done:
            _log.warning("the broker is away; %d jobs wait for their leases", len(self._jobs))
        self._client.close()
        self._beat_client.close()
        return done

    def _stop_engine(self) -> list[Job]:
        unseen = [m.claim.job for m in self._inbox.take(0) if isinstance(m, Claimed) and m.claim]
        running = self._runner.jobs
        for job in running:
            self._runner.abandon(job)
        return running + unseen

    def _write_all(self, deadline: float) -> None:
        while self._outbound.has_work and time.monotonic() < deadline:
            try:
                num_writes = self._outbound.flush(everything=True)
            except (redis.RedisError, OSError) as error:
                _log.warning("cannot write the last tokens yet: %s", error)
                num_writes = 0
            if not num_writes:
                # Nothing tells us when the broker is back, or takes what it refuses.
                time.sleep(_RETRY_SECONDS)

    def _deregister(self, deadline: float) -> bool:
        try:
            unread = self._registration.deregister(self._reader.cursor)
            for entry_id, fields in unread:
                command = parse_command(entry_id, fields)
                if command is not None and command.kind is CommandKind.RUN:
                    self._give_back(command.job_id, command.fence)
            self._write_all(deadline)
        except (redis.RedisError, OSError) as error:
            _log.warning("cannot deregister: %s", error)
            return False
        return True

    def _give_back(self, job_id: str, fence: int) -> None:
        self._releaser.release(Job(self._loader.ref_of(job_id), fence))
