"""The worker's main loop: messages in, engine steps, status out."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.protocol.messages import WorkerStatus
from tidemill_gpuworker.engine.job_engine import JobEngine
from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.cache_news import CacheObserver
from tidemill_gpuworker.shell.claims import Claim, KindClaim, Refusal
from tidemill_gpuworker.shell.commands import BEGIN
from tidemill_gpuworker.shell.inbox import (
    Cancelled,
    Claimed,
    DrainAsked,
    Hinted,
    Inbox,
    Lost,
    Message,
    ThreadDied,
    Woken,
)
from tidemill_gpuworker.shell.job_runner import JobRunner
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.shell.releaser import Releaser
from tidemill_gpuworker.shell.status import StatusReporter
from tidemill_gpuworker.shell.work_clock import WorkClock

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with; each is shared with other threads but the engine and its runner."""

    engine: JobEngine
    runner: JobRunner
    jobs: JobTable
    inbox: Inbox
    publisher: Publisher
    releaser: Releaser
    status: StatusReporter
    clock: WorkClock


class Worker:
    """Runs on the main thread, from the first command to the end of the drain.

    Without work it blocks on its inbox. While the broker takes no tokens and the publisher is
    full it makes no steps, but still obeys messages.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        drain_seconds: float,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._drain_seconds = drain_seconds
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._meter = metrics.EngineMeter(parts.engine)
        self._cache = CacheObserver(parts.engine.step_scheduler.block_manager)
        self._drain_deadline: float | None = None
        self._last_command = BEGIN
        self._error: Exception | None = None

    @property
    def is_draining(self) -> bool:
        """Whether new jobs are given back unseen."""
        return self._drain_deadline is not None

    def run(self) -> None:
        """Work until drained; raises what killed one of the threads, or ``EngineFailed``."""
        self._report()
        while not self._is_over:
            for message in self._parts.inbox.take(self._patience()):
                with self._parts.clock.working():
                    self.handle(message)
            if self._can_step:
                with self._parts.clock.working():
                    self._step()
            if self._parts.status.is_due or not self._can_step:
                with self._parts.clock.working():
                    self._report()
        if self._error is not None:
            raise self._error

    def handle(self, message: Message) -> None:
        """Act on one message."""
        match message:
            case Claimed(command_id, claim):
                self._last_command = command_id
                self._claimed(claim)
            case Cancelled(command_id, job_id, fence):
                self._last_command = command_id
                self._cancelled(job_id, fence)
            case Hinted(command_id, refs):
                self._last_command = command_id
                self._parts.engine.step_scheduler.block_manager.hint(refs)
            case Lost(job):
                self._lost(job)
            case DrainAsked(now, command_id):
                self._last_command = command_id or self._last_command
                self._drain(now)
            case ThreadDied(error):
                self._error = error
                self._drain(now=True)
            case Woken():
                pass

    @property
    def _can_step(self) -> bool:
        return self._parts.runner.can_step and not self._parts.publisher.is_full

    @property
    def _is_over(self) -> bool:
        if self._drain_deadline is None:
            return False
        return not self._parts.runner.has_work or self._clock() >= self._drain_deadline

    def _patience(self) -> float:
        if self._can_step:
            return 0.0
        if self._drain_deadline is None:
            return self._idle_seconds
        return max(0.0, min(self._idle_seconds, self._drain_deadline - self._clock()))

    def _step(self) -> None:
        with metrics.STEP_SECONDS.time():
            self._parts.runner.step()
        self._meter.observe()
        if self._parts.runner.fault is not None:
            self._error = self._parts.runner.fault
            self._drain(now=True)

    def _claimed(self, claim: Claim | KindClaim | Refusal | None) -> None:
        # A job may be lost between its claim and this moment.
        if claim is None or not self._parts.jobs.holds(claim.job):
            return
        if self.is_draining:
            self._parts.releaser.release(claim.job)
        elif isinstance(claim, Refusal):
            self._parts.runner.refuse(claim)
        else:
            self._parts.runner.admit(claim)

    def _cancelled(self, job_id: str, fence: int) -> None:
        job = self._parts.jobs.get(job_id)
        if job is not None and job.fence == fence:
            _log.info("%s: cancelled", job_id)
            self._abandon(job)

    def _lost(self, job: Job) -> None:
        # A heartbeat may meet a job that has just ended, before the reply to its end is here.
        if self._parts.publisher.is_ending(job) or self._parts.releaser.has(job):
            return
        if self._parts.jobs.holds(job):
            _log.warning("%s: attempt %d is not ours any more", job.job_id, job.fence)
            metrics.LOST_JOBS.inc()
        self._abandon(job)

    def _abandon(self, job: Job) -> None:
        self._parts.runner.abandon(job)
        self._parts.publisher.forget(job)
        self._parts.jobs.discard(job)

    def _drain(self, now: bool) -> None:
        if not self.is_draining:
            _log.info("draining: %d jobs still run", len(self._parts.runner.jobs))
        deadline = self._clock() + (0.0 if now else self._drain_seconds)
        self._drain_deadline = min(deadline, self._drain_deadline or deadline)

    def _report(self) -> None:
        departed = self._parts.runner.take_departed()
        status = self.status().model_copy(update={"finished": departed})
        # What is not told now is told by the next report.
        news = self._cache.observe() if self._parts.status.takes_news else None
        self._parts.status.report(status, news)
        metrics.UNPUBLISHED.set(self._parts.publisher.num_unpublished)

    def status(self) -> WorkerStatus:
        """How far the worker is, counting everything up to the last command.

        Without the sequences that left, which one report tells of.
        """
        scheduler, figures = self._parts.engine.step_scheduler, self._parts.engine.figures
        return WorkerStatus(
            last_command=self._last_command,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._parts.runner.num_held,
            waiting_tokens=scheduler.num_waiting_tokens,
            urgent_tokens=scheduler.num_urgent_tokens,
            free_blocks=scheduler.block_manager.num_free_blocks,
            step_seconds=figures.last_step_seconds,
            prompt_tokens=figures.num_prompt_tokens,
            cached_tokens=figures.num_cached_tokens,
            generated_tokens=figures.num_generated_tokens,
            num_preemptions=figures.num_preemptions,
            draining=self.is_draining,
            step=figures.last_step,
            step_cost=self._parts.engine.learner.fitted,
            kv=scheduler.kv_use,
        )
