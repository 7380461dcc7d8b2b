"""Following a log of several choices: what of each was given out, in whatever order it stands."""

from collections import Counter
from typing import Protocol


class Told(Protocol):
    """A chunk of a log."""

    @property
    def end(self) -> int:
        """Its place in the log."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Its tokens."""

    @property
    def text(self) -> str:
        """Its text."""

    @property
    def choice(self) -> int:
        """Whose they are."""


class ChoiceWalk:
    """A walk through a log from its first entry, and what was given out on all walks so far.

    A job that its server or its workers have lost is computed again: each choice says the same,
    but the log may tell of them in another order, so that a place in it means something else.
    ``num_tokens`` and ``num_chars`` were given out of the first choice before.
    """

    def __init__(self, num_tokens: int, num_chars: int) -> None:
        #: Tokens of all choices that the walk has passed.
        self.passed = 0
        self._passed_tokens: Counter[int] = Counter()
        self._passed_chars: Counter[int] = Counter()
        self._given_tokens = Counter({0: num_tokens})
        self._given_chars = Counter({0: num_chars})

    def start_over(self) -> None:
        """Begin at the first entry again."""
        self.passed = 0
        self._passed_tokens.clear()
        self._passed_chars.clear()

    def take(self, chunk: Told) -> tuple[int, int]:
        """Pass the next chunk; returns how many of its tokens and characters were given before."""
        self.passed, choice = chunk.end, chunk.choice
        old_tokens = self._given_tokens[choice] - self._passed_tokens[choice]
        old_chars = self._given_chars[choice] - self._passed_chars[choice]
        self._passed_tokens[choice] += len(chunk.ids)
        self._passed_chars[choice] += len(chunk.text)
        self._given_tokens |= self._passed_tokens
        self._given_chars |= self._passed_chars
        return min(len(chunk.ids), max(0, old_tokens)), min(len(chunk.text), max(0, old_chars))
