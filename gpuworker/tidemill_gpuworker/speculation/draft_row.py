"""What the sampler sees of a sequence whose draft has come true up to a point."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.guide import Guide, TokenMask

if TYPE_CHECKING:
    # Slow to load, and not needed by what decides which sequences run.
    import torch

    from tidemill_gpuworker.sampling.sampling_row import SamplingState


@dataclass
class DraftRow:
    """A ``SamplingRow``: the sequence as it will be if ``drafted`` comes true."""

    seq: Sequence
    drafted: tuple[int, ...]
    _state: "SamplingState | None" = field(default=None, init=False)

    @property
    def sampling_state(self) -> "SamplingState | None":
        """A copy of the sequence's own, which must not count what may be wrong."""
        known = self.seq.sampling_state
        if self._state is None and known is not None:
            counts = None if known.counts is None else known.counts.copy()
            thinking = None if known.thinking is None else known.thinking.copy()
            self._state = replace(known, counts=counts, thinking=thinking)
        return self._state

    @sampling_state.setter
    def sampling_state(self, state: "SamplingState | None") -> None:
        self._state = state

    @property
    def seq_id(self) -> str:
        """The sequence's."""
        return self.seq.seq_id

    @property
    def params(self) -> SamplingParams:
        """The sequence's."""
        return self.seq.params

    @property
    def seed(self) -> int:
        """The sequence's."""
        return self.seq.seed

    @property
    def choice(self) -> int:
        """The sequence's."""
        return self.seq.choice

    @property
    def prompt_ids(self) -> list[int]:
        """The sequence's."""
        return self.seq.prompt_ids

    @cached_property
    def output_ids(self) -> list[int]:
        """Everything before this row's token."""
        return [*self.seq.output_ids, *self.drafted]

    @property
    def num_tokens(self) -> int:
        """Position of this row's token."""
        return self.seq.num_tokens + len(self.drafted)

    @property
    def bad_word_ids(self) -> Several[Several[int]]:
        """The sequence's."""
        return self.seq.bad_word_ids

    @cached_property
    def guide(self) -> TokenMask | None:
        """The sequence's, as it will be behind the draft."""
        guide = self.seq.guide
        return None if guide is None else GuideAhead(guide, self.drafted)


@dataclass
class GuideAhead:
    """A guide as it will be behind tokens that it allows; itself it does not move."""

    guide: Guide
    token_ids: tuple[int, ...]

    @property
    def has_ended(self) -> bool:
        """Whether EOS tokens alone may come then."""
        self._advance()
        try:
            return self.guide.has_ended
        finally:
            self.guide.rollback(len(self.token_ids))

    def fill_mask(self, row: "torch.Tensor") -> None:
        """Write which tokens may come then."""
        self._advance()
        try:
            self.guide.fill_mask(row)
        finally:
            self.guide.rollback(len(self.token_ids))

    def _advance(self) -> None:
        for token_id in self.token_ids:
            self.guide.accept(token_id)
