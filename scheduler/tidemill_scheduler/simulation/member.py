"""The simulator's view of its workers and of the jobs that have not ended."""

from dataclasses import replace

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.sequence import Sequence
from tidemill_scheduler.simulation.worker import SimWorker


class Member:
    """A worker and what the simulator knows of it."""

    __slots__ = (
        "attempts",
        "is_computing",
        "is_heard",
        "joined_at",
        "kv_lag",
        "kv_seq",
        "left_at",
        "num_commands",
        "step_number",
        "worker",
    )

    def __init__(self, worker: SimWorker, *, joined_at: float, kv_lag: float) -> None:
        self.worker = worker
        self.joined_at = joined_at
        #: When it was given up, None while it belongs to the cluster.
        self.left_at: float | None = None
        #: Seconds by which its KV events come late.
        self.kv_lag = kv_lag
        #: The last batch of KV events that a snapshot covered.
        self.kv_seq = 0
        #: Names the step whose end is expected; an event of any other is void.
        self.step_number = 0
        #: Whether it works, and whether anybody hears of it.
        self.is_computing = True
        self.is_heard = True
        #: Jobs dispatched to it that have not ended, by id.
        self.attempts: dict[str, Attempt] = {}
        self.num_commands = 0


class Attempt:
    """A job that has not ended, with the attempt under way if there is one."""

    __slots__ = ("dispatched_at", "job", "member", "output_tokens", "sequence")

    def __init__(self, job: WaitingJob, output_tokens: int) -> None:
        self.job = job
        self.output_tokens = output_tokens
        self.member: Member | None = None
        self.sequence: Sequence | None = None
        #: When it was first given to a worker.
        self.dispatched_at = -1.0

    def start(self, member: Member, now: float, number: int) -> Sequence:
        """Begin an attempt, the ``number``-th of all, on a worker."""
        job = self.job
        member.num_commands += 1
        seq = Sequence(job, self.output_tokens, number, f"1-{member.num_commands}")
        self.member, self.sequence = member, seq
        member.attempts[job.job_id] = self
        if self.dispatched_at < 0:
            self.dispatched_at = now
        return seq

    def give_back(self) -> Sequence:
        """End the attempt because its worker is lost; returns its sequence."""
        member, seq = self.member, self.sequence
        assert member is not None and seq is not None
        self.member = self.sequence = None
        crashes = 0 if seq.first_token_at else self.job.crashes + 1
        self.job = replace(
            self.job,
            attempts=self.job.attempts + 1,
            crashes=crashes,
            last_worker=member.worker.id,
        )
        return seq
