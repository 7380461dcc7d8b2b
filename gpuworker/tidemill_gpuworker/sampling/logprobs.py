"""Logprobs of chosen tokens, their ranks, and the likeliest tokens beside them."""

from collections.abc import Sequence as Several
from typing import NamedTuple

import torch

from tidemill.protocol.logprobs import LEAST_LOGPROB, Alternative, TokenLogprobs
from tidemill.protocol.sampling import ALL_LOGPROBS, SamplingParams


class Wanted(NamedTuple):
    """What is told of a row beside its own token's logprob."""

    num_top: int
    asked_ids: tuple[int, ...] = ()


def wanted_logprobs(params: SamplingParams) -> Wanted | None:
    """Return what a job wants to know of each token; None if nothing."""
    if params.logprobs is None:
        return None
    return Wanted(params.logprobs, params.logprob_token_ids)


def read_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, wanted: Several[Wanted]
) -> list[TokenLogprobs]:
    """Return what is told of ``token_ids``, int64 [rows], by their logits, float32 [rows, vocab].

    Equal logprobs are ordered by token id, in ``rank`` and ``top``.  Raises ``ArithmeticError`` if
    a token's logprob is not a number.
    """
    logprobs = logits.log_softmax(dim=1)
    own = logprobs.gather(1, token_ids[:, None])
    if not bool(own.isfinite().all()):
        raise ArithmeticError("the model gave logits of which no logprobs can be made")
    keys = _keys(logprobs)
    ranks = (keys < keys.gather(1, token_ids[:, None])).sum(dim=1) + 1
    tops = _tops(logprobs, keys, [each.num_top for each in wanted])
    own = own.clamp_(min=LEAST_LOGPROB)[:, 0]
    return [
        # Checked by construction; validating each would take longer than computing it.
        TokenLogprobs.model_construct(
            logprob=logprob, rank=rank, top=top, asked=_asked(logprobs[row], each.asked_ids)
        )
        for row, (logprob, rank, top, each) in enumerate(
            zip(own.tolist(), ranks.tolist(), tops, wanted, strict=True)
        )
    ]


def _keys(logprobs: torch.Tensor) -> torch.Tensor:
    # No logprob is positive, so the bits of its magnitude order them, the likeliest first; the
    # token id in the low half breaks ties.  int64 [rows, vocab], all of a row different.
    keys = logprobs.view(torch.int32).long()
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    return keys.bitwise_and_(0x7FFFFFFF).bitwise_left_shift_(32).bitwise_or_(ids)


def _tops(
    logprobs: torch.Tensor, keys: torch.Tensor, nums: Several[int]
) -> list[tuple[Alternative, ...]]:
    vocab = logprobs.shape[1]
    sizes = [vocab if num == ALL_LOGPROBS else min(num, vocab) for num in nums]
    most = max(sizes, default=0)
    if not most:
        return [()] * len(sizes)
    ids = keys.topk(most, dim=1, largest=False).values & 0xFFFFFFFF
    values = logprobs.gather(1, ids).clamp_(min=LEAST_LOGPROB)
    return [
        tuple(zip(row_ids[:size], row_values[:size], strict=True))
        for row_ids, row_values, size in zip(ids.tolist(), values.tolist(), sizes, strict=True)
    ]


def _asked(logprobs: torch.Tensor, ids: tuple[int, ...]) -> tuple[Alternative, ...]:
    if not ids:
        return ()
    values = logprobs[torch.tensor(ids, device=logprobs.device)].clamp_(min=LEAST_LOGPROB)
    return tuple(zip(ids, values.tolist(), strict=True))
