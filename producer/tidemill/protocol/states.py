"""The states of a job and the moves between them."""

from enum import StrEnum


class JobState(StrEnum):
    """Value of the ``st`` field of a job hash."""

    DELAYED = "delayed"
    QUEUED = "queued"
    RUNNING = "run"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"

    @property
    def is_terminal(self) -> bool:
        """Whether the job can never change again."""
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset(
    {JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.DEAD}
)

#: State -> states that a function may move it to.  ``run -> queued`` is a requeue, ``run ->
#: delayed`` a retry.
ALLOWED_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.DELAYED: frozenset({JobState.QUEUED}) | TERMINAL_STATES,
    JobState.QUEUED: frozenset({JobState.RUNNING}) | TERMINAL_STATES,
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.DELAYED}) | TERMINAL_STATES,
    **{state: frozenset() for state in TERMINAL_STATES},
}


class FinishReason(StrEnum):
    """Why a generation ended, in the names OpenAI clients know, and which of its limits passed."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    STALLED = "stalled"
