"""Brings what the engine generated into the token logs, in few and large writes."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from tidemill.protocol import calls
from tidemill.protocol.calls import Written
from tidemill.protocol.functions import Call, run_each
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import JobEnd, JobResult, TokenChunk
from tidemill.service.runtime import crash_point
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.shell import metrics
from tidemill_gpuworker.shell.alarm import NEVER, Alarm
from tidemill_gpuworker.shell.jobs import Job, JobTable
from tidemill_gpuworker.shell.outbox import Outbox, Outgoing, PublishPolicy, Update, Write


class Publisher:
    """Holds all output until the server has it.

    The step loop feeds it, another thread calls ``flush``. Nothing is dropped while the broker is
    away; ``is_full`` asks the step loop to pause instead, and ``on_room`` to go on. ``on_lost``
    is told of attempts that the server says are not ours any more.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: ShardKeys,
        worker_id: str,
        jobs: JobTable,
        alarm: Alarm,
        *,
        on_lost: Callable[[Job], None],
        on_room: Callable[[], None],
        policy: PublishPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._jobs = jobs
        self._alarm = alarm
        self._on_lost = on_lost
        self._on_room = on_room
        self._policy = policy or PublishPolicy()
        self._clock = clock
        self._outbox = Outbox(self._policy)
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether the engine has to wait until the server has taken some tokens."""
        return self._outbox.num_unpublished >= self._policy.max_unpublished_tokens

    @property
    def num_unpublished(self) -> int:
        """Tokens generated but not yet known to be in a log."""
        return self._outbox.num_unpublished

    @property
    def next_due(self) -> float:
        """When the next write is due by the clock; infinity if there is none."""
        with self._lock:
            return self._outbox.next_due

    @property
    def has_work(self) -> bool:
        """Whether anything is still to be written."""
        return self.next_due < NEVER

    def generated(self, job: Job, choice: int = 0) -> Generated | None:
        """What this and earlier attempts generated of a choice; None if the job is not open."""
        with self._lock:
            return self._outbox.generated(job, choice)

    def num_tokens(self, job: Job) -> int:
        """How many tokens of all choices this and earlier attempts have generated."""
        with self._lock:
            return self._outbox.num_tokens(job)

    def is_ending(self, job: Job) -> bool:
        """Whether the end of this attempt is being written: the reply will tell whose it was."""
        with self._lock:
            return self._outbox.is_ending(job)

    def open(self, job: Job, written: Sequence[TokenChunk] = ()) -> None:
        """Begin with a job whose log holds ``written``; replaces an older attempt of the job."""
        with self._lock:
            self._outbox.open(job, written)

    def publish(self, updates: Sequence[Update]) -> None:
        """Take over the outcome of a step; jobs that are not open any more are passed over."""
        with self._lock:
            now = self._clock()
            for update in updates:
                self._outbox.add(update, now)
            next_due = self._outbox.next_due
        self._alarm.set(next_due)

    def close(self, job: Job, then: Callable[[], None]) -> None:
        """Take no more output of an attempt; calls ``then``, on any thread, once all is written.

        An attempt that turns out not to be ours any more is passed over.
        """
        with self._lock:
            is_written = self._outbox.close(job, then, self._clock())
            next_due = self._outbox.next_due
        if is_written:
            then()
        self._alarm.set(next_due)

    def forget(self, job: Job) -> None:
        """Drop what is left of an attempt that is not ours any more."""
        with self._lock:
            self._outbox.forget(job)

    def flush(self, *, everything: bool = False) -> int:
        """Write what is due, or everything, in one round trip; returns how many writes succeeded.

        A write that the server fails on is tried again later, alone. Raises what redis-py raises
        when the server is away; the next call then writes it all again.
        """
        now = self._clock()
        with self._lock:
            horizon = NEVER if everything else now + self._policy.slack_seconds
            writes = self._outbox.select(horizon)
        if not writes:
            return 0
        _pass_crash_points("before", writes)
        replies = _per_write(run_each(self._client, self._calls(writes)), writes)
        _pass_crash_points("after", writes)
        self._apply(writes, replies)
        return sum(isinstance(reply, Written) and reply.accepted for reply in replies)

    def _apply(self, writes: Sequence[Write], replies: Sequence[Written | Exception]) -> None:
        with self._lock:
            was_full = self.is_full
            outcome = self._outbox.apply(writes, replies, self._clock())
        metrics.LOG_REPAIRS.inc(outcome.num_repaired)
        for job in outcome.ended:
            self._jobs.discard(job)
        for then in outcome.then:
            then()
        for job in outcome.lost:
            self._on_lost(job)
        if was_full and not self.is_full:
            self._on_room()

    def _calls(self, writes: Sequence[Write]) -> list[Call[Any]]:
        appends = [(w.item.job.job_id, w.item.job.fence, w.chunk) for w in writes if w.end is None]
        batch: list[Call[Any]] = []
        if appends:
            batch.append(calls.append(self._keys, worker_id=self._worker_id, chunks=appends))
        return batch + [self._finish(write) for write in writes if write.end is not None]

    def _finish(self, write: Write) -> Call[Written]:
        assert write.end is not None
        job = write.item.job
        return calls.finish(
            self._keys,
            job.ref,
            fence=job.fence,
            worker_id=self._worker_id,
            chunk=write.chunk,
            result=_result(write.item, write.end, write.chunk),
        )


def _result(item: Outgoing, end: JobEnd, chunk: TokenChunk) -> JobResult:
    result = item.buffer.result(end, chunk, item.prompt)
    return result.model_copy(update={"outcome": item.outcome}) if item.outcome else result


def _per_write(replies: Sequence[Any], writes: Sequence[Write]) -> list[Written | Exception]:
    num_appends = sum(write.end is None for write in writes)
    if not num_appends:
        return list(replies)
    appended, *finished = replies
    if isinstance(appended, Exception):
        appended = [appended] * num_appends
    return [*appended, *finished]


def _pass_crash_points(moment: str, writes: Sequence[Write]) -> None:
    if any(write.end is None for write in writes):
        crash_point(f"worker.{moment}_append")
    if any(write.end is not None for write in writes):
        crash_point(f"worker.{moment}_finish")
