"""What is to be written to which token log, and when: decisions without a broker."""

import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tidemill.protocol.calls import Written
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd, TokenChunk
from tidemill.protocol.outcomes import Outcome as JobOutcome
from tidemill.protocol.states import JobState
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.scored_prompt import ScoredPrompt
from tidemill_gpuworker.shell.alarm import NEVER
from tidemill_gpuworker.shell.jobs import Job
from tidemill_gpuworker.shell.token_buffer import TokenBuffer

_log = logging.getLogger(__name__)

#: The functions take this many jobs a call.
MAX_JOBS_PER_CALL = 256
#: A longer backlog, after an outage, is written in several chunks.
MAX_CHUNK_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """How often tokens are written, and when the engine has to wait for that.

    The first token of an attempt is written at once, later ones every ``stream_seconds`` or, for
    a job that nobody watches live, ``quiet_seconds``; what is due within ``slack_seconds`` goes
    along. Many live jobs share ``max_chunks_per_second``, since a chunk costs server and publisher
    more than the tokens in it. A write that the server failed on is repeated after
    ``retry_seconds``, then after twice that, and so on up to ``max_retry_seconds``.
    """

    stream_seconds: float = 0.040
    quiet_seconds: float = 0.500
    slack_seconds: float = 0.010
    max_chunks_per_second: float = 2_000.0
    retry_seconds: float = 0.100
    max_retry_seconds: float = 5.0
    max_unpublished_tokens: int = 65_536


@dataclass(frozen=True, slots=True)
class Update:
    """What one step brought for one job: tokens, the text that became certain, perhaps the end.

    ``logprobs`` has one entry per token if the job asked for them.  All tokens are of one
    ``choice``.  ``prompt`` and ``outcome`` count with the end.
    """

    job_id: str
    ids: Sequence[int] = ()
    text: str = ""
    end: JobEnd | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt: ScoredPrompt | None = None
    outcome: JobOutcome | None = None
    choice: int = 0


@dataclass(slots=True, eq=False)
class Outgoing:
    """One attempt's output; ``due_at`` is None while there is nothing to write.

    ``then`` means that no more will come; it is for whoever tells what becomes of the job once all
    is written.  ``log_end`` is set for a log that cannot be read, only closed.
    """

    job: Job
    buffer: TokenBuffer
    due_at: float | None = None
    last_sent_at: float | None = None
    end: JobEnd | None = None
    prompt: ScoredPrompt | None = None
    outcome: JobOutcome | None = None
    num_failures: int = 0
    then: Callable[[], None] | None = None
    log_end: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """A chunk about to be written; with ``end`` it is the last one and finishes the job."""

    item: Outgoing
    chunk: TokenChunk
    end: JobEnd | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch of writes, by attempt; ``num_repaired`` logs were not as expected.

    ``ended`` attempts have told their end; ``then`` is of those that were closed and are written.
    """

    ended: tuple[Job, ...] = ()
    then: tuple[Callable[[], None], ...] = ()
    lost: tuple[Job, ...] = ()
    num_repaired: int = 0


class Outbox:
    """The output of all open jobs. Times are seconds of one monotonic clock."""

    def __init__(self, policy: PublishPolicy) -> None:
        self._policy = policy
        self._items: dict[str, Outgoing] = {}
        #: Tokens generated but not yet known to be in a log.
        self.num_unpublished = 0

    @property
    def next_due(self) -> float:
        """When the next write is due; infinity if there is none."""
        times = (item.due_at for item in self._items.values() if item.due_at is not None)
        return min(times, default=NEVER)

    def open(self, job: Job, written: Sequence[TokenChunk]) -> None:
        """Begin with an attempt whose log holds ``written``."""
        self._drop(job.job_id)
        self._items[job.job_id] = Outgoing(job, TokenBuffer(written))

    def forget(self, job: Job) -> None:
        """Drop an attempt, unless a newer one has replaced it."""
        if (item := self._items.get(job.job_id)) is not None and item.job == job:
            self._drop(job.job_id)

    def generated(self, job: Job, choice: int = 0) -> Generated | None:
        """What the attempt has generated of a choice; None if it is not open."""
        item = self._items.get(job.job_id)
        if item is None or item.job != job:
            return None
        told = item.buffer.choice(choice)
        return Generated(list(told.ids), len(told.text))

    def num_tokens(self, job: Job) -> int:
        """How many tokens of all choices the attempt has generated; 0 if it is not open."""
        item = self._items.get(job.job_id)
        return 0 if item is None or item.job != job else item.buffer.num_tokens

    def is_ending(self, job: Job) -> bool:
        """Whether the end of this attempt is being written."""
        item = self._items.get(job.job_id)
        return item is not None and item.job == job and item.end is not None

    def add(self, update: Update, now: float) -> None:
        """Take over new output; updates of jobs that are not open are passed over."""
        item = self._items.get(update.job_id)
        if item is None:
            return
        item.buffer.add(update.ids, update.text, update.logprobs, update.choice)
        self.num_unpublished += len(update.ids)
        if update.end is not None:
            item.end, item.prompt, item.outcome = update.end, update.prompt, update.outcome
        if update.end is not None or item.due_at is None:
            self._schedule(item, now)

    def close(self, job: Job, then: Callable[[], None], now: float) -> bool:
        """Take no more output of an attempt; returns True, forgetting it, if all is written.

        Else ``then`` comes back with the outcome that leaves nothing to write.
        """
        item = self._items.get(job.job_id)
        if item is None or item.job != job:
            return False
        if not item.buffer.num_pending:
            self._drop(job.job_id)
            return True
        item.then = then
        self._schedule(item, now)
        return False

    def select(self, horizon: float) -> list[Write]:
        """What is due by ``horizon``: appends first, then the writes that finish a job."""
        due = ((item.due_at, item) for item in self._items.values() if item.due_at is not None)
        ready = (pair for pair in due if pair[0] <= horizon)
        # The earliest first, or a worker of many jobs would serve the same ones again and again.
        chosen = heapq.nsmallest(MAX_JOBS_PER_CALL, ready, key=itemgetter(0))
        return sorted((_write(item) for _, item in chosen), key=lambda write: write.end is not None)

    def apply(
        self, writes: Sequence[Write], replies: Sequence[Written | Exception], now: float
    ) -> Outcome:
        """Take in the server's replies to ``writes``."""
        ended, then, lost, num_repaired = [], [], [], 0
        for write, reply in zip(writes, replies, strict=True):
            job = write.item.job
            # Forgotten or replaced by a newer attempt while the write was under way.
            if self._items.get(job.job_id) is not write.item:
                continue
            if isinstance(reply, Exception) or (reply.owned and not reply.accepted):
                num_repaired += 1
                if not self._repair(write.item, reply, now):
                    lost.append(job)
            elif _is_finished(write, reply):
                ended.append(job)
            elif not reply.owned:
                lost.append(job)
            else:
                self._advance(write.item, write.chunk.end, now)
            if write.item.then and not write.item.buffer.num_pending:
                then.append(write.item.then)
                self._drop(job.job_id)
        for job in (*ended, *lost):
            self._drop(job.job_id)
        return Outcome(tuple(ended), tuple(then), tuple(lost), num_repaired)

    def _advance(self, item: Outgoing, end: int, now: float) -> None:
        self.num_unpublished -= end - item.buffer.num_written
        item.buffer.acknowledge(end)
        item.last_sent_at = now
        item.num_failures = 0
        self._schedule(item, now)

    def _repair(self, item: Outgoing, reply: Written | Exception, now: float) -> bool:
        if isinstance(reply, Exception) or reply.num_tokens is None:
            _log.warning("%s: the server failed to write tokens: %s", item.job.job_id, reply)
            self._postpone(item, now)
            return True
        before = item.buffer.num_pending
        if not item.buffer.move_to(reply.num_tokens):
            if item.end is not None and item.end.state == JobState.FAILED:
                # Its job ends because its log cannot be read: then behind what is there.
                item.log_end = reply.num_tokens
                return True
            _log.error("%s: the log holds tokens nobody here generated", item.job.job_id)
            return False
        self.num_unpublished += item.buffer.num_pending - before
        # No fresh token is among what the log lacks, so it is late already.
        item.last_sent_at = None
        self._schedule(item, now)
        return True

    def _postpone(self, item: Outgoing, now: float) -> None:
        delay = self._policy.retry_seconds * 2.0 ** min(item.num_failures, 10)
        item.due_at = now + min(delay, self._policy.max_retry_seconds)
        item.num_failures += 1

    def _schedule(self, item: Outgoing, now: float) -> None:
        if item.end is not None:
            item.due_at = now
        elif not item.buffer.num_pending:
            item.due_at = None
        elif item.last_sent_at is None or item.then is not None:
            item.due_at = now
        else:
            # Each chunk is of one choice.
            interval = self._interval(item) / max(1, item.buffer.num_waiting_choices)
            item.due_at = max(now, item.last_sent_at + interval)

    def _interval(self, item: Outgoing) -> float:
        if not item.job.stream:
            return self._policy.quiet_seconds
        share = len(self._items) / self._policy.max_chunks_per_second
        return max(self._policy.stream_seconds, share)

    def _drop(self, job_id: str) -> None:
        item = self._items.pop(job_id, None)
        if item is not None:
            self.num_unpublished -= item.buffer.num_pending


def _write(item: Outgoing) -> Write:
    if item.log_end is not None:
        return Write(item, TokenChunk(start=item.log_end, end=item.log_end), item.end)
    chunk = item.buffer.next_chunk(MAX_CHUNK_TOKENS)
    is_last = chunk.end == item.buffer.num_tokens
    return Write(item, chunk, item.end if is_last else None)


def _is_finished(write: Write, reply: Written) -> bool:
    # A refused end that is there already is ours: the reply to an earlier try was lost.
    return write.end is not None and (reply.accepted or reply.state == write.end.state)
