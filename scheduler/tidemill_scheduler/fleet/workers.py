"""What one worker can still take: credit in tokens, sequence slots and KV blocks."""

from dataclasses import dataclass
from math import ceil

from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill_scheduler.intake.jobs import WaitingJob, entry_number

#: Steps beyond the one that runs for which a worker is given prompt tokens at most.
MAX_STEPS_AHEAD = 2

#: Weight of the newest acknowledgement, and of the newest step, in their means.
_ACK_SHARE = 0.2
_STEP_SHARE = 0.2
#: So much of a step is no delay.
_ACK_NOISE = 0.02

#: Sequences beyond ``max_num_seqs`` that wait in the worker, as a share of it, so that a slot that
#: becomes free is filled without a round trip.
QUEUE_SHARE = 8

#: So many statuses in a row without waiting prompts show that all sequences produce tokens, and
#: that the first of them were published.
_SETTLED_STATUSES = 2


@dataclass(slots=True)
class _InFlight:
    tokens: int
    urgent: int
    num_seqs: int
    command: tuple[int, int] | None = None
    sent_at: float | None = None


class Worker:
    """A registered worker; its credit dies with it.

    Outstanding work is what the last status reports plus what was dispatched after the command
    that the status names.
    """

    __slots__ = (
        "_block_size",
        "_in_flight",
        "_in_flight_seqs",
        "_in_flight_tokens",
        "_in_flight_urgent",
        "_last_command",
        "_most_seqs",
        "_num_settled",
        "_reported_command",
        "_reported_free",
        "_reported_seqs",
        "_reported_tokens",
        "_reported_urgent",
        "_step_seconds",
        "_step_tokens",
        "ack_seconds",
        "capacity",
        "credit",
        "full_since",
        "heard_at",
        "info",
        "is_draining",
        "seq_slack",
        "status",
    )

    def __init__(self, info: WorkerInfo, now: float) -> None:
        self.info = info
        #: The last status, None before the first one.
        self.status: WorkerStatus | None = None
        #: Whether it asked for no more work.
        self.is_draining = False
        #: When the worker was last heard of, on the caller's clock, in seconds.
        self.heard_at = now
        #: Since when it has had no slot or block for any job, None if it has.
        self.full_since: float | None = None
        #: Mean time from a dispatch to the status that covers it, None before the first one.
        self.ack_seconds: float | None = None
        self._step_seconds = 0.0
        self._in_flight: dict[str, _InFlight] = {}
        self._in_flight_tokens = 0
        self._in_flight_urgent = 0
        self._in_flight_seqs = 0
        self._num_settled = 0
        # What the last status reports; asked for several times in each decision.
        self._reported_tokens = 0
        self._reported_urgent = 0
        self._reported_seqs = 0
        self._reported_free = info.num_blocks
        self._reported_command = (0, 0)
        self._last_command = "0-0"
        #: How many sequences more than an idle worker it may hold before it counts as crowded.
        self.seq_slack = max(1, info.max_num_seqs // QUEUE_SHARE)
        self._most_seqs = info.max_num_seqs + self.seq_slack
        self._step_tokens = info.max_num_batched_tokens
        self._block_size = info.block_size
        #: Uncached prompt tokens that it may have ahead.
        self.credit = self._credit()
        #: Tokens that its KV pool can hold.
        self.capacity = info.num_blocks * info.block_size

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens given to the worker and, as far as known, not computed yet."""
        return self._reported_tokens + self._in_flight_tokens

    @property
    def urgent_tokens(self) -> int:
        """Those of the outstanding tokens that belong to interactive jobs."""
        return self._reported_urgent + self._in_flight_urgent

    @property
    def num_seqs(self) -> int:
        """Sequences the worker runs, keeps waiting, or is about to read."""
        return self._reported_seqs + self._in_flight_seqs

    @property
    def is_settled(self) -> bool:
        """Whether all its sequences, if any, already produce tokens."""
        return self.num_seqs == 0 or (
            not self._in_flight and self._num_settled >= _SETTLED_STATUSES
        )

    @property
    def load(self) -> float:
        """Share of its capacity in use; comparable between workers."""
        tokens = self._reported_tokens + self._in_flight_tokens
        num_seqs = self._reported_seqs + self._in_flight_seqs
        return tokens / self._step_tokens + num_seqs / self.info.max_num_seqs

    @property
    def is_full(self) -> bool:
        """Whether it lacks a sequence slot or KV blocks for any job, whatever its credit."""
        num_seqs = self._reported_seqs + self._in_flight_seqs
        return num_seqs > 0 and (num_seqs >= self._most_seqs or self._reported_free <= 1)

    @property
    def has_credit(self) -> bool:
        """Whether it could take a job of one token."""
        return self._has_room(1, self._reported_tokens + self._in_flight_tokens)

    @property
    def has_urgent_credit(self) -> bool:
        """Whether it could take an interactive job of one token, which others do not hold up."""
        return self._has_room(1, self.urgent_tokens)

    def can_hold(self, job: WaitingJob) -> bool:
        """Whether the job's prompt would fit if the worker had nothing else."""
        return job.is_estimated or job.cost <= self.capacity

    def fits(self, job: WaitingJob, tokens: int, *, is_urgent: bool = False) -> bool:
        """Whether a job with ``tokens`` uncached prompt tokens is within the worker's credit.

        Urgent ones go before the others there, so only what is urgent is in their way.
        """
        if is_urgent:
            ahead = self._reported_urgent + self._in_flight_urgent
        else:
            ahead = self._reported_tokens + self._in_flight_tokens
        return self._has_room(tokens, ahead, job.num_outputs) and self.can_hold(job)

    def reserve(
        self, job_id: str, tokens: int, *, is_urgent: bool = False, num_seqs: int = 1
    ) -> None:
        """Charge a job that is about to be sent, in place of what it was charged before."""
        self.drop(job_id)
        self._in_flight[job_id] = _InFlight(tokens, tokens if is_urgent else 0, num_seqs)
        self._in_flight_seqs += num_seqs
        self._num_settled = 0
        self._in_flight_tokens += tokens
        self._in_flight_urgent += tokens if is_urgent else 0

    def sent(self, job_id: str, command_id: str, now: float | None = None) -> None:
        """Note the run command of a reserved job; from then on a status may cover it.

        ``now`` is when it was written, on the clock of ``update``; None leaves it unmeasured.
        """
        entry = self._in_flight.get(job_id)
        if entry is None:
            return
        command = entry_number(command_id)
        if self.status and command <= self._reported_command:
            self.drop(job_id)
        else:
            entry.command, entry.sent_at = command, now

    def drop(self, job_id: str) -> None:
        """Take back the charge of a job that was not sent after all, or is reported by now."""
        entry = self._in_flight.pop(job_id, None)
        if entry is not None:
            self._in_flight_tokens -= entry.tokens
            self._in_flight_urgent -= entry.urgent
            self._in_flight_seqs -= entry.num_seqs

    def update(self, status: WorkerStatus, now: float) -> None:
        """Replace what was known by the worker's own account; raises ``MalformedMessage``."""
        # Most steps bring no command.
        if status.last_command != self._last_command:
            self._reported_command = entry_number(status.last_command)
            self._last_command = status.last_command
        self.status, self.heard_at = status, now
        self.is_draining = status.draining
        self._reported_tokens = status.waiting_tokens
        self._reported_urgent = status.urgent_tokens
        self._reported_seqs = status.num_running + status.num_waiting
        self._reported_free = status.free_blocks
        if status.step_seconds:
            self._step_seconds = _mean(self._step_seconds, status.step_seconds, _STEP_SHARE)
        if self._in_flight:
            self._acknowledge(now)
        self.credit = self._credit()
        if not self.is_full:
            self.full_since = None
        elif self.full_since is None:
            self.full_since = now
        if self._in_flight or status.num_waiting or status.waiting_tokens:
            self._num_settled = 0
        else:
            self._num_settled += 1

    def _acknowledge(self, now: float) -> None:
        last = self._reported_command
        covered = {
            job_id: entry.sent_at
            for job_id, entry in self._in_flight.items()
            if entry.command is not None and entry.command <= last
        }
        for job_id in covered:
            self.drop(job_id)
        if times := [sent_at for sent_at in covered.values() if sent_at is not None]:
            self.ack_seconds = _mean(self.ack_seconds, now - min(times), _ACK_SHARE)

    def _credit(self) -> int:
        """A step's worth that runs, and as much as runs until what is sent now arrives.

        An acknowledgement takes a step and what the way there and back adds to it.
        """
        num_steps = 1
        if self.ack_seconds is not None and self._step_seconds:
            num_steps = ceil(self.ack_seconds / self._step_seconds - 1 - _ACK_NOISE)
        return self._step_tokens * (1 + min(max(num_steps, 1), MAX_STEPS_AHEAD))

    def _has_room(self, tokens: int, ahead: int, wanted_seqs: int = 1) -> bool:
        # Asked for several times in each decision, hence without helpers.
        num_seqs = self._reported_seqs + self._in_flight_seqs
        if num_seqs == 0:
            return True
        if num_seqs + wanted_seqs > self._most_seqs:
            return False
        # With less than a step ahead a long prompt must be there in time as well.
        if ahead >= self._step_tokens and ahead + tokens > self.credit:
            return False
        # One block more than the prompt fills, for the tokens to come.
        size = self._block_size
        outstanding = self._reported_tokens + self._in_flight_tokens
        return -(-tokens // size) - -(-outstanding // size) < self._reported_free


def _mean(known: float | None, new: float, share: float) -> float:
    return known + share * (new - known) if known else new


def reluctance(worker: Worker, job: WaitingJob, fresh_since: float) -> tuple[bool, bool, float]:
    """Order workers for a job, the best first.

    The one that lost the job may be about to lose it again, one not heard of lately may be dead.
    """
    is_last = worker.info.worker_id == job.last_worker
    return (is_last, worker.heard_at <= fresh_since, worker.load)
