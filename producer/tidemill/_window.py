"""Which items of a ``map`` are in flight, and in which order outcomes come out; pure."""

from collections import deque
from typing import Generic, TypeVar

from tidemill._checks import shown
from tidemill.protocol.errors import InvalidRequest

T = TypeVar("T")

#: In order, so many times ``max_in_flight`` items may be ahead of the one that is yielded next:
#: one slow job must neither stall the others nor let their results pile up without bound.
REORDER_FACTOR = 16


class Window(Generic[T]):
    """Numbers the items as they start, and gives their outcomes out as they may be yielded."""

    def __init__(self, max_in_flight: int, *, ordered: bool) -> None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int):
            raise InvalidRequest(
                f"max_in_flight: {type(max_in_flight).__name__} is not a whole number",
                field="max_in_flight",
            )
        if max_in_flight < 1:
            raise InvalidRequest(
                f"max_in_flight: {shown(max_in_flight)} is less than 1", field="max_in_flight"
            )
        self._max_in_flight = max_in_flight
        self._ordered = ordered
        self._num_started = 0
        self._num_taken = 0
        self._done: dict[int, T] = {}
        self._finish_order: deque[int] = deque()

    @property
    def num_in_flight(self) -> int:
        """Items that started and have no outcome yet."""
        return self._num_started - self._num_taken - len(self._done)

    @property
    def num_finished(self) -> int:
        """Items that have an outcome, taken out or not."""
        return self._num_taken + len(self._done)

    @property
    def is_empty(self) -> bool:
        """Whether every item that started has been taken out."""
        return self._num_started == self._num_taken

    @property
    def has_room(self) -> bool:
        """Whether another item may start."""
        num_ahead = self._num_started - self._num_taken
        return (
            self.num_in_flight < self._max_in_flight
            and num_ahead < self._max_in_flight * REORDER_FACTOR
        )

    def start(self) -> int:
        """Count one more item in; returns its number."""
        self._num_started += 1
        return self._num_started - 1

    def finish(self, index: int, outcome: T) -> None:
        """Note the outcome of an item."""
        self._done[index] = outcome
        self._finish_order.append(index)

    def pop(self) -> list[T]:
        """Take the outcomes whose turn has come."""
        outcomes = []
        while (index := self._next()) in self._done:
            outcomes.append(self._done.pop(index))
            self._num_taken += 1
        return outcomes

    def _next(self) -> int:
        if self._ordered:
            return self._num_taken
        return self._finish_order.popleft() if self._finish_order else -1
