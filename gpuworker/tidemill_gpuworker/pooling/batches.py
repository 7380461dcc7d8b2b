"""Which inputs go through an encoder together: pure decisions about lengths."""

from collections.abc import Sequence

#: Inputs share a batch if the longest is at most so much longer than the shortest: padding costs
#: as much as tokens do.
_SPREAD = 1.25
_SLACK_TOKENS = 8


def take(lengths: Sequence[int], budget: int) -> int:
    """Return how many of the inputs fit in front of the budget of tokens; one always does."""
    total = 0
    for count, length in enumerate(lengths):
        total += length
        if total > budget:
            return max(1, count)
    return len(lengths)


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of inputs of similar length together, each once."""
    result: list[list[int]] = []
    limit = -1.0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if lengths[index] > limit:
            result.append([])
            limit = lengths[index] * _SPREAD + _SLACK_TOKENS
        result[-1].append(index)
    return result
