"""Restrict rows of logits to the likely tokens; what is filtered out becomes -inf.

Each function works in place on float32 [rows, vocab] and takes one number per row. A row's result
does not depend on the other rows. Tokens tied with the last one kept are kept too, so the outcome
does not hang on the order in which a device happens to sort them.
"""

import torch

_NOTHING = float("-inf")

#: How many of a row's likeliest tokens are sorted to find its nucleus, until it lies within them.
#: Of 49k tokens on one CPU core that took 0.2, 1.3 and 7 ms; most rows need the first step only.
_NUCLEUS_STEPS = (256, 4096)


def apply_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Divide by the temperatures, float32 [rows], which are > 0."""
    logits.div_(temperatures[:, None])


def apply_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> None:
    """Keep tokens at least ``min_p`` times as likely as the likeliest; float32 [rows], -inf is off.

    p / p_max = exp(logit - logit_max), so no softmax is needed.
    """
    threshold = logits.amax(dim=1) + log_min_p
    logits.masked_fill_(logits < threshold[:, None], _NOTHING)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep the ``top_k`` likeliest tokens; int64 [rows], 0 or less is off."""
    vocab = logits.shape[1]
    num_kept = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    # Rows that are off must not force a sort of everything.
    largest = int(torch.where(num_kept < vocab, num_kept, 1).max())
    values = logits.topk(largest, dim=1).values
    threshold = values.gather(1, (num_kept.clamp(max=largest) - 1)[:, None])
    threshold.masked_fill_((num_kept == vocab)[:, None], _NOTHING)
    logits.masked_fill_(logits < threshold, _NOTHING)


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the smallest set of likeliest tokens that together have ``top_p``; float32 [rows]."""
    # Softmax runs row by row: sums over a whole tensor would be split by its shape.
    probs = logits.softmax(dim=1)
    is_off = top_p >= 1.0
    threshold = _nucleus_threshold(probs, top_p.double().masked_fill(is_off, 0.0))
    threshold.masked_fill_(is_off, 0.0)
    logits.masked_fill_(probs < threshold[:, None], _NOTHING)


def _nucleus_threshold(probs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    # float32 [rows, vocab], float64 [rows] -> the least probability kept, float32 [rows]
    threshold = torch.empty_like(probs[:, 0])
    rows = torch.arange(len(probs), device=probs.device)
    for size in (*_NUCLEUS_STEPS, probs.shape[1]):
        descending = _largest(probs if len(rows) == len(probs) else probs[rows], size)
        sums = descending.double().cumsum(dim=1)
        # The likeliest token is always kept; any other if those before it do not suffice.
        num_kept = 1 + (sums[:, :-1] < wanted[rows, None]).sum(dim=1)
        threshold[rows] = descending.gather(1, num_kept[:, None] - 1)[:, 0]
        rows = rows[sums[:, -1] < wanted[rows]]
        if size >= probs.shape[1] or not len(rows):
            break
    return threshold


def _largest(values: torch.Tensor, num: int) -> torch.Tensor:
    if num >= values.shape[1]:
        return values.sort(dim=1, descending=True).values
    return values.topk(num, dim=1).values
