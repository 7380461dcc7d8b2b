"""Samples behind drafts, and keeps what came true.

Each token is drawn from the model's own logits with the key of its own position, as it would be
without a draft; a drafted token is kept if it is the one that was drawn.  So outputs do not depend
on what was guessed.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tidemill.protocol.errors import CannotGoOn
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.speculation.draft_row import DraftRow
from tidemill_gpuworker.steps.step_plan import ScheduledSequence

if TYPE_CHECKING:
    import torch


class RowSampler(Protocol):
    """A sampler whose rows may be those of sequences or of drafts."""

    def sample(self, logits: Any, rows: list[Any]) -> list[SampledToken]:
        """Return one token per row."""


def sample_drafted(
    sampler: RowSampler, logits: "torch.Tensor", items: tuple[ScheduledSequence, ...]
) -> list[tuple[SampledToken, ...]]:
    """Return the new tokens of each item, of which all but the last were drafted.

    ``logits`` is [rows, vocabulary] with 1 + len(draft) rows for each item, one after another.
    Raises as the sampler does.
    """
    rows = [row for item in items for row in _rows_of(item)]
    try:
        tokens = sampler.sample(logits, rows)
    except (ArithmeticError, CannotGoOn):
        # Perhaps only behind something wrong, where nobody would have come.
        return [(token,) for token in _without_drafts(sampler, logits, items)]
    return list(_split(tokens, items))


def _rows_of(item: ScheduledSequence) -> list[Sequence | DraftRow]:
    ahead = (DraftRow(item.seq, item.draft[:count]) for count in range(1, len(item.draft) + 1))
    # The sequence itself comes first, so that what is kept of it is there for the others.
    return [item.seq, *ahead]


def _without_drafts(
    sampler: RowSampler, logits: "torch.Tensor", items: tuple[ScheduledSequence, ...]
) -> list[SampledToken]:
    first, firsts = 0, []
    for item in items:
        firsts.append(first)
        first += 1 + len(item.draft)
    return sampler.sample(logits[firsts], [item.seq for item in items])


def _split(
    tokens: list[SampledToken], items: tuple[ScheduledSequence, ...]
) -> Iterable[tuple[SampledToken, ...]]:
    start = 0
    for item in items:
        end = start + 1
        for drafted in item.draft:
            if tokens[end - 1].id != drafted:
                break
            end += 1
        yield tuple(tokens[start:end])
        start += 1 + len(item.draft)
