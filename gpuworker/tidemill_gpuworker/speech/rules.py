"""Which tokens a window may continue with, as in the reference code of arXiv 2212.04356."""

from collections.abc import Sequence

import torch

from tidemill_gpuworker.speech.vocabulary import Vocabulary

_NEVER = float("-inf")


def apply_rules(
    logits: torch.Tensor, sampled: Sequence[int], vocabulary: Vocabulary, *, timestamps: bool
) -> torch.Tensor:
    """Return the logits [vocabulary] with what must not follow ``sampled`` at minus infinity."""
    logits = logits.clone()
    logits[list(vocabulary.suppressed)] = _NEVER
    if not sampled:
        logits[list(vocabulary.suppressed_first)] = _NEVER
    if timestamps:
        _apply_timestamp_rules(logits, sampled, vocabulary)
    return logits


def _apply_timestamp_rules(
    logits: torch.Tensor, sampled: Sequence[int], vocabulary: Vocabulary
) -> None:
    """Timestamps come in pairs, except before the end of text, and never go back."""
    begin = vocabulary.first_timestamp
    logits[vocabulary.no_timestamps] = _NEVER
    last_is_time = bool(sampled) and sampled[-1] >= begin
    is_pair_done = len(sampled) < 2 or sampled[-2] >= begin
    if last_is_time and is_pair_done:
        logits[begin:] = _NEVER
    elif last_is_time:
        logits[: vocabulary.end] = _NEVER
    times = [token_id for token_id in sampled if token_id >= begin]
    if times:
        # The end of a segment may be the start of the next one, but a segment is not empty.
        least = times[-1] if last_is_time and not is_pair_done else times[-1] + 1
        logits[begin:least] = _NEVER
    if not sampled:
        logits[:begin] = _NEVER
        logits[begin + vocabulary.max_initial_timestamp + 1 :] = _NEVER
    _prefer_timestamps(logits, begin)


def _prefer_timestamps(logits: torch.Tensor, begin: int) -> None:
    """Take a timestamp if all of them together are more likely than any other token."""
    logprobs = logits.float().log_softmax(dim=-1)
    if logprobs[begin:].logsumexp(dim=-1) > logprobs[:begin].max():
        logits[:begin] = _NEVER
