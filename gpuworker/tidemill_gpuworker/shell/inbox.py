"""What the other threads tell the step loop."""

import queue
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill_gpuworker.shell.claims import Claim, KindClaim, Refusal
from tidemill_gpuworker.shell.jobs import Job


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job to run, or one to refuse; ``claim`` is None if it was not ours any more."""

    command_id: str
    claim: Claim | KindClaim | Refusal | None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Somebody ended the job: its computation is to stop."""

    command_id: str
    job_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class Hinted:
    """How many waiting jobs will use the prefix up to each routing hash, 0 for no more."""

    command_id: str
    refs: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class Lost:
    """The server says that this attempt is not ours any more."""

    job: Job


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Claim nothing new; with ``now`` give back what runs instead of finishing it."""

    now: bool = False
    command_id: str | None = None


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A thread of the worker met an error that is none of the broker's."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Woken:
    """Something the loop waits for may have changed."""


Message = Claimed | Cancelled | Hinted | Lost | DrainAsked | ThreadDied | Woken


class Inbox:
    """Messages in order; any thread may put, the step loop takes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Append a message; wakes the step loop if it waits."""
        self._queue.put(message)

    def take(self, timeout_seconds: float) -> list[Message]:
        """All messages there are; blocks for the first one, at most so long (0: not at all)."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout_seconds > 0, timeout_seconds or None))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
