"""What the sampler has to know of a row of logits, and what it keeps for the next step."""

from collections.abc import Collection
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.sampling.guide import TokenMask
from tidemill_gpuworker.sampling.thinking import ReasoningMarkers, ThinkingBudget
from tidemill_gpuworker.sampling.token_counts import TokenCounts


class SamplingRow(Protocol):
    """The sequence that a row of logits belongs to: its logits follow ``output_ids``.

    ``seed``, ``choice`` and ``num_tokens``, the position of the token to be chosen, fix the draw.
    ``sampling_state`` is the sampler's own, None at first, and may be dropped at any time.
    """

    sampling_state: "SamplingState | None"

    @property
    def seq_id(self) -> str:
        """Names the sequence in errors."""

    @property
    def params(self) -> SamplingParams:
        """How the token is to be chosen."""
        ...

    @property
    def seed(self) -> int:
        """64 bits."""

    @property
    def choice(self) -> int:
        """Which of a job's outputs this is."""

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""

    @property
    def output_ids(self) -> list[int]:
        """Everything generated before this row's token."""

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output."""

    @property
    def bad_word_ids(self) -> Several[Several[int]]:
        """The token sequences that must not be completed."""

    @property
    def guide(self) -> TokenMask | None:
        """The structural constraint."""


@dataclass(slots=True)
class SamplingState:
    """A sequence's parameters in the form that edits of logits take.

    Everything in here follows from the parameters and the tokens, so that a sequence which is
    built again, as after a takeover, samples as if nothing had happened.
    """

    #: Whether a row needs edits at every step.
    always_edits: bool
    min_tokens: int
    #: Tokens that would end the output, forbidden before ``min_tokens``.
    stop_ids: tuple[int, ...]
    allowed: torch.Tensor | None
    #: Token ids, int64, and what is added to their logits, float32; both [tokens].
    bias_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    counts: TokenCounts | None
    #: Of a sequence without one, and without a marker that could end its reasoning, None.
    thinking: ThinkingBudget | None = None

    def edits(self, row: SamplingRow) -> bool:
        """Whether this step changes logits of the row before temperature and filters."""
        return (
            self.always_edits
            or len(row.output_ids) < self.min_tokens
            or row.guide is not None
            or self.ends_reasoning(row)
        )

    def ends_reasoning(self, row: SamplingRow) -> bool:
        """Whether the row's token must be the one that ends its reasoning.

        What a guide forms has none.
        """
        thinking = self.thinking if row.guide is None else None
        return thinking is not None and thinking.is_spent(row.output_ids)


def state_of(
    row: SamplingRow,
    eos_token_ids: Collection[int],
    device: torch.device,
    markers: ReasoningMarkers | None = None,
) -> SamplingState:
    """Return what is kept of a row, made at its first step."""
    if row.sampling_state is None:
        row.sampling_state = _make_state(row, eos_token_ids, device, markers)
    return row.sampling_state


def _make_state(
    row: SamplingRow,
    eos_token_ids: Collection[int],
    device: torch.device,
    markers: ReasoningMarkers | None,
) -> SamplingState:
    params = row.params
    allowed, counts = None, None
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(sorted(set(params.allowed_token_ids)), device=device)
    if params.has_penalties:
        counts = TokenCounts(row.prompt_ids if params.repetition_penalty != 1.0 else ())
    budget = params.thinking_token_budget
    thinking = None
    if markers is not None and budget is not None:
        thinking = ThinkingBudget(markers, budget, row.prompt_ids)
    return SamplingState(
        always_edits=bool(
            allowed is not None or row.bad_word_ids or params.logit_bias or counts is not None
        ),
        min_tokens=params.min_tokens,
        stop_ids=(*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)),
        allowed=allowed,
        bias_ids=np.array([token_id for token_id, _ in params.logit_bias], np.int64),
        bias=np.array([bias for _, bias in params.logit_bias], np.float32),
        counts=counts,
        thinking=thinking,
    )
