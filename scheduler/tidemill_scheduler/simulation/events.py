"""The future of a simulation: what happens when."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Handler = Callable[[Any], None]


class Events:
    """Calls handlers in order of time; those of one time in the order in which they came."""

    def __init__(self) -> None:
        #: Seconds of the simulation.
        self.now = 0.0
        #: Handlers called so far.
        self.num_handled = 0
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, when: float, handler: Handler, what: Any) -> None:
        """Call ``handler(what)`` at this time."""
        self._num_added += 1
        heappush(self._heap, (when, self._num_added, handler, what))

    def after(self, seconds: float, handler: Handler, what: Any) -> None:
        """Call ``handler(what)`` so much later."""
        self.at(self.now + seconds, handler, what)

    def advance(self) -> None:
        """Go on to the next time at which something happens and let all of it happen."""
        heap = self._heap
        self.now = now = heap[0][0]
        while heap and heap[0][0] == now:
            _, _, handler, what = heappop(heap)
            self.num_handled += 1
            handler(what)
