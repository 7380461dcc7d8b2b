"""A heap whose outdated entries leave when they come to the top."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Items by an order, a number breaking ties, for as long as ``is_current(order, item)``.

    An item that moves is pushed again; nothing is ever removed on purpose.
    """

    def __init__(self, is_current: Callable[[float, T], bool]) -> None:
        self._is_current = is_current
        self._entries: list[tuple[float, int, T]] = []
        self._limit = 64

    def push(self, order: float, number: int, item: T) -> None:
        """Add an item; ``number`` is its own, so that items are never compared."""
        if len(self._entries) >= self._limit:
            self._clean()
        heappush(self._entries, (order, number, item))

    def first(self) -> T | None:
        """Return the current item with the least order."""
        while self._entries:
            order, _, item = self._entries[0]
            if self._is_current(order, item):
                return item
            heappop(self._entries)
        return None

    def _clean(self) -> None:
        self._entries = [e for e in self._entries if self._is_current(e[0], e[2])]
        heapify(self._entries)
        self._limit = 64 + 2 * len(self._entries)
