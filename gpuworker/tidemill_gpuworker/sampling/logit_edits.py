"""Change the logits of single tokens, before temperature and filters look at whole rows.

Each function works in place on float32 [rows, vocab]; a row's result does not depend on the other
rows.  ``Edited`` rows come with their place in the tensor.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidemill.protocol.errors import GrammarTooComplex
from tidemill_gpuworker.sampling.sampling_row import SamplingRow, SamplingState

_NOTHING = float("-inf")
_MASK_BITS = 32
#: Keeps a product or quotient of logit and penalty finite in float32.
_LEAST_PENALTY, _MOST_PENALTY = 1e-30, 1e30


class Edited(NamedTuple):
    """One row that needs edits: its place, its sequence, and what is kept of it."""

    place: int
    row: SamplingRow
    state: SamplingState


def edit(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Apply allowed_token_ids, bad_words, min_tokens, logit_bias, guides, penalties, and budgets.

    The order is vLLM's.
    """
    allow(logits, edited)
    forbid(logits, edited)
    add_bias(logits, edited)
    apply_guides(logits, edited)
    apply_penalties(logits, edited)
    end_reasoning(logits, edited)


def allow(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Leave only the tokens of ``allowed_token_ids``."""
    for place, _, state in edited:
        if state.allowed is not None:
            kept = logits[place, state.allowed]
            logits[place].fill_(_NOTHING)
            logits[place, state.allowed] = kept


def forbid(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Forbid what would complete a bad word, and what would end the output too early."""
    places: list[int] = []
    columns: list[int] = []
    for place, row, state in edited:
        forbidden = [*_last_of_bad_words(row)]
        has_ended = row.guide is not None and row.guide.has_ended
        if len(row.output_ids) < state.min_tokens and not has_ended:
            forbidden += state.stop_ids
        places += [place] * len(forbidden)
        columns += forbidden
    if places:
        index = torch.tensor([places, columns], device=logits.device)
        nothing = torch.tensor(_NOTHING, device=logits.device)
        logits.index_put_((index[0], index[1]), nothing)


def add_bias(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Add ``logit_bias``."""
    biased = [item for item in edited if len(item.state.bias)]
    if biased:
        index = _index(biased, [item.state.bias_ids for item in biased], logits.device)
        bias = torch.from_numpy(np.concatenate([item.state.bias for item in biased]))
        logits[index] += bias.to(logits.device)


def apply_guides(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Forbid what the guides do not allow next; raises ``GrammarTooComplex`` with the row's id."""
    guided = [(place, row) for place, row, _ in edited if row.guide is not None]
    if not guided:
        return
    vocab = logits.shape[1]
    masks = torch.zeros(len(guided), -(-vocab // _MASK_BITS), dtype=torch.int32)
    for mask, (_, row) in zip(masks, guided, strict=True):
        _fill(mask, row)
    places = torch.tensor([place for place, _ in guided], device=logits.device)
    is_forbidden = ~unpack_mask(masks.to(logits.device), vocab)
    logits[places] = logits[places].masked_fill(is_forbidden, _NOTHING)


def _fill(mask: torch.Tensor, row: SamplingRow) -> None:
    assert row.guide is not None
    try:
        row.guide.fill_mask(mask)
    except GrammarTooComplex as error:
        raise error.of((row.seq_id,)) from error


def unpack_mask(masks: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return bool [rows, vocab] of int32 [rows, ceil(vocab / 32)]: bit t % 32 of word t // 32."""
    bits = torch.arange(_MASK_BITS, dtype=torch.int32, device=masks.device)
    is_set = (masks[:, :, None] >> bits) & 1
    return is_set.bool().flatten(1)[:, :vocab]


def apply_penalties(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Apply repetition_penalty to tokens of prompt and output, then the others to the output's.

    logit > 0 is divided by the repetition penalty, any other multiplied by it (Keskar et al.,
    CTRL, 2019); then frequency_penalty is taken off for each occurrence and presence_penalty once.
    """
    penalised = [item for item in edited if item.state.counts is not None]
    if not penalised:
        return
    for item in penalised:
        assert item.state.counts is not None
        item.state.counts.count(item.row.output_ids)
    tables = [item.state.counts for item in penalised if item.state.counts is not None]
    sizes = [len(table.ids) for table in tables]

    def spread(values: list[float]) -> torch.Tensor:
        repeated = np.repeat(np.array(values, np.float32), sizes)
        return torch.from_numpy(repeated).to(logits.device)

    index = _index(penalised, [table.ids for table in tables], logits.device)
    counts = torch.from_numpy(np.concatenate([t.counts for t in tables])).to(logits.device)
    params = [item.row.params for item in penalised]
    values = logits[index]
    repetition = spread([_in_range(p.repetition_penalty) for p in params])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([p.frequency_penalty for p in params]) * counts
    values -= spread([p.presence_penalty for p in params]) * (counts > 0)
    logits[index] = values


def end_reasoning(logits: torch.Tensor, edited: Several[Edited]) -> None:
    """Leave only the token that ends the reasoning where thinking_token_budget is used up."""
    for place, row, state in edited:
        if state.thinking is not None and state.ends_reasoning(row):
            logits[place].fill_(_NOTHING)
            logits[place, state.thinking.close] = 0.0


def _index(
    edited: Several[Edited], ids: list[npt.NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    # Rows and columns of each edited row's tokens, both int64 [tokens of all].
    places = np.repeat([item.place for item in edited], [len(each) for each in ids])
    index = torch.from_numpy(np.stack([places, np.concatenate(ids)])).to(device)
    return index[0], index[1]


def _in_range(penalty: float) -> float:
    return min(_MOST_PENALTY, max(_LEAST_PENALTY, penalty))


def _last_of_bad_words(row: SamplingRow) -> Iterator[int]:
    for word in row.bad_word_ids:
        num_before = len(word) - 1
        if not num_before or row.output_ids[-num_before:] == list(word[:-1]):
            yield word[-1]
