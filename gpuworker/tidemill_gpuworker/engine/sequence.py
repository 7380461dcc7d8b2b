"""A sequence: one job's tokens inside a worker, and how far its KV cache reaches."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.prefix import ExtraKeys
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.sampling.guide import Guide

if TYPE_CHECKING:
    # It loads torch, which is slow and not needed by what decides which sequences run.
    from tidemill_gpuworker.lora.layers import LoadedAdapter
    from tidemill_gpuworker.sampling.sampling_row import SamplingState
    from tidemill_gpuworker.speculation.ngram import TokenHistory


class SequenceStatus(Enum):
    """Where a sequence is in the step scheduler."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class PriorityClass(IntEnum):
    """What a priority stands for in a step, the most urgent first."""

    INTERACTIVE = -1
    STANDARD = 0
    BATCH = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one job's tokens.

    The step scheduler owns ``output_ids``, ``status``, ``arrival`` and the counts but
    ``num_resumed_tokens``; the block manager owns everything about blocks.  ``seed`` and position
    alone fix the randomness.
    ``num_resumed_tokens`` of ``output_ids`` were generated, and published, by an earlier attempt.
    """

    seq_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    extra_keys: ExtraKeys | None = None
    priority: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_resumed_tokens: int = 0
    #: Which of its job's outputs this is.
    choice: int = 0
    #: Whether it waits after each row of logits to be told how it goes on.
    is_beam: bool = False
    #: Whether it waits so now; the step scheduler's, as ``status``.
    is_held: bool = False
    #: Sequences of the same prompt that part from this one at its first token; the engine starts
    #: them then.
    followers: "list[Sequence]" = field(default_factory=list)
    #: Token sequences that must not be completed.
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    #: What changes the model's weights for this sequence; its name and digest are extra keys.
    adapter: "LoadedAdapter | None" = None
    #: Which tokens a structural constraint allows next; None without one.
    guide: Guide | None = None
    #: What the sampler keeps from step to step.
    sampling_state: "SamplingState | None" = None
    #: What the drafter keeps from step to step.
    history: "TokenHistory | None" = None
    #: Of the prompt's tokens, as far as they are known; the model runner sets them.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    #: Length of the text that was published with these; None if it is what they make certain.
    num_published_chars: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    #: Running number of this sequence in its step scheduler, which sets it.
    arrival: int = 0
    #: Tokens whose KV entries are in the cache once the current step has run.
    num_computed_tokens: int = 0
    #: Prompt tokens found in the prefix cache at the first admission; None before it.
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    #: Physical block of each logical block.
    block_table: list[int] = field(default_factory=list)
    #: How many logical blocks at the beginning have no physical one any more.
    num_null_blocks: int = 0
    #: Chained hash of each full block of known tokens, computed lazily.
    block_hashes: list[bytes] = field(default_factory=list)
    #: How many blocks of the prefix were cached when that was last counted.
    num_prefix_blocks: int = 0

    @property
    def priority_class(self) -> PriorityClass:
        """The class of this sequence's priority."""
        if self.priority > 0:
            return PriorityClass.BATCH
        return PriorityClass.INTERACTIVE if self.priority else PriorityClass.STANDARD

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether tokens of the prompt must go through the model for the sake of their logprobs."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that still have to go through the model."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

    def token_slice(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions ``start`` to ``end`` (exclusive)."""
        split = len(self.prompt_ids)
        if end <= split:
            return self.prompt_ids[start:end]
        if start >= split:
            return self.output_ids[start - split : end - split]
        return self.prompt_ids[start:] + self.output_ids[: end - split]
