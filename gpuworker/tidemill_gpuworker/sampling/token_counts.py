"""Which tokens a sequence holds, and how often it generated each: what penalties are made of."""

from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one sequence, kept up to date as its output grows.

    Only what is new since the last call is looked at, so a step costs nothing for the length of
    the text.  The prompt's tokens are among them, with a count of 0, if it is given.
    """

    def __init__(self, prompt_ids: Several[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt_ids, np.int64))
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        capacity = len(distinct) + _FIRST_CAPACITY
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(capacity, np.float32)
        self._num_counted = 0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, [tokens]; valid until the next ``count``."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``ids`` was generated, [tokens]."""
        return self._counts[: len(self._places)]

    def copy(self) -> "TokenCounts":
        """Return counts that go their own way."""
        twin = TokenCounts()
        twin._places, twin._num_counted = dict(self._places), self._num_counted
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        return twin

    def count(self, output_ids: Several[int]) -> None:
        """Take in what was generated since; ``output_ids`` is everything generated so far."""
        for token_id in output_ids[self._num_counted :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
            self._counts[place] += 1.0
        self._num_counted = len(output_ids)

    def _grow(self) -> None:
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
