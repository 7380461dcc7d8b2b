"""What one engine step computes: the contract between step scheduler and model runner."""

from dataclasses import dataclass

from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copies import NO_COPIES, BlockCopies


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_tokens`` tokens of one sequence from position ``start``, which all have KV blocks.

    The last of them are ``draft``, guesses of what follows the known tokens.
    """

    seq: Sequence
    start: int
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last scheduled token: the context length of this step."""
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        """Position after the last scheduled token that is known."""
        return self.end - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """The scheduled tokens, [num_tokens]."""
        return self.seq.token_slice(self.start, self.known_end) + list(self.draft)

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the scheduled tokens belong to the prompt."""
        return max(0, min(self.end, self.seq.num_prompt_tokens) - self.start)

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that the next one can be sampled.

        True until the sampled token is appended.
        """
        return self.known_end == self.seq.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: sequences with a single token (decodes) first, then prefill chunks.

    ``copies`` are made before anything is computed.
    """

    scheduled: tuple[ScheduledSequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    copies: BlockCopies = NO_COPIES

    @property
    def num_tokens(self) -> int:
        """Tokens that the step puts through the model."""
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def num_decodes(self) -> int:
        """How many sequences at the front have exactly one scheduled token."""
        count = 0
        while count < len(self.scheduled) and self.scheduled[count].num_tokens == 1:
            count += 1
        return count

    @property
    def sampling(self) -> tuple[ScheduledSequence, ...]:
        """The sequences that get new tokens from this step, in order."""
        return tuple(item for item in self.scheduled if item.samples)

    @property
    def has_drafts(self) -> bool:
        """Whether any of its tokens are guesses."""
        return any(item.draft for item in self.scheduled)
