"""What one step did for a job of several outputs."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import ChoiceEnd
from tidemill.protocol.outcomes import Outcome
from tidemill_gpuworker.engine.job_engine import Finish
from tidemill_gpuworker.engine.sequence import Sequence


class SequenceOutput(Protocol):
    """What a step did for one of the sequences."""

    @property
    def seq(self) -> Sequence:
        """The sequence."""

    @property
    def new_ids(self) -> tuple[int, ...]:
        """Its new tokens."""

    @property
    def text(self) -> str:
        """Text that became certain."""

    @property
    def finish(self) -> Finish | None:
        """Set once the sequence has ended."""

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One per new token if they are wanted."""


class Group(Protocol):
    """A job of several sequences, which is one piece of work to whoever runs jobs."""

    @property
    def seq_id(self) -> str:
        """The job's id."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, which they share."""

    @property
    def num_cached_tokens(self) -> int | None:
        """How much of it was cached; None if that is not known yet."""

    @property
    def output_ids(self) -> Several[int]:
        """The tokens of all of them."""

    @property
    def num_resumed_tokens(self) -> int:
        """How many of those earlier attempts generated."""

    @property
    def lead(self) -> Sequence:
        """The sequence that stands for the prompt."""


@dataclass(frozen=True, slots=True)
class GroupOutput:
    """New tokens of one choice; ``finish`` is set once all choices have ended.

    Then ``ends`` has one entry per choice.  Without tokens it tells that the group has made
    progress, and what it is will show later.
    """

    seq: Group
    choice: int = 0
    new_ids: tuple[int, ...] = ()
    text: str = ""
    finish: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    ends: tuple[ChoiceEnd, ...] = ()
    outcome: Outcome | None = field(default=None, init=False)


def end_of(finish: Finish, score: float | None = None) -> ChoiceEnd:
    """Return how a choice ended as it is told."""
    return ChoiceEnd(finish_reason=str(finish.reason), stop_reason=finish.stop_reason, score=score)
