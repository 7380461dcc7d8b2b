"""Guesses what comes next from what came after the same words before.

Prompt lookup decoding (Saxena, 2023) as in vLLM's ``ngram`` method: no second model, but texts that
repeat their prompt or themselves, as summaries, edits and code do, are guessed well.
"""

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


def propose(context: Tokens, num_tokens: int, shortest: int, longest: int) -> list[int]:
    """Return ``num_tokens`` tokens that may follow ``context``, int64 [tokens]; or none.

    They are those behind the latest of the earlier occurrences of the longest suffix, of
    ``shortest`` to ``longest`` tokens, that has any.  Where such an occurrence overlaps the end,
    the text repeats with a period, and the guess goes on with it.
    """
    start = _occurrence(context, shortest, longest)
    if start is None or num_tokens < 1:
        return []
    period = len(context) - start
    tail = context[start : start + num_tokens].tolist()
    return [tail[place % period] for place in range(num_tokens)]


def _occurrence(context: Tokens, shortest: int, longest: int) -> int | None:
    # Position behind the occurrence that is taken.
    longest = min(longest, len(context) - 1)
    if longest < shortest:
        return None
    # Ends of earlier occurrences of the last token, then of the last two, and so on.
    ends = np.flatnonzero(context[:-1] == context[-1])
    length = 1
    while length < longest:
        longer = ends[ends >= length]
        longer = longer[context[longer - length] == context[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < shortest or not len(ends):
        return None
    return int(ends[-1]) + 1


class TokenHistory:
    """The tokens of one sequence as an array that grows with it."""

    def __init__(self) -> None:
        self._tokens: Tokens = np.zeros(256, np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """All tokens, [tokens]; valid until the next ``extend``."""
        return self._tokens[: self._length]

    def extend(self, token_ids: list[int]) -> None:
        """Append the tokens that are new."""
        end = self._length + len(token_ids)
        if end > len(self._tokens):
            grown = np.zeros(max(end, 2 * len(self._tokens)), np.int64)
            grown[: self._length] = self.tokens
            self._tokens = grown
        self._tokens[self._length : end] = token_ids
        self._length = end
