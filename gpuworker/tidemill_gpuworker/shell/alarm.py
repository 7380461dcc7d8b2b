"""A wake-up call that other threads may bring forward."""

import threading
import time
from collections.abc import Callable

NEVER = float("inf")


class Alarm:
    """Wakes one waiting thread at the earliest of the times that were set.

    Setting a later time than the present one costs no wake-up, because each one would take the
    interpreter lock from the step loop for nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._at = NEVER

    def set(self, at: float) -> None:
        """Ring at ``at``, seconds of the clock, at the latest."""
        with self._changed:
            if at < self._at:
                self._at = at
                self._changed.notify()

    def ring(self) -> None:
        """Ring now."""
        self.set(float("-inf"))

    def wait(self, timeout_seconds: float) -> None:
        """Block until the alarm rings, at most so long; afterwards no time is set."""
        deadline = self._clock() + timeout_seconds
        with self._changed:
            while (left := min(self._at, deadline) - self._clock()) > 0:
                self._changed.wait(left)
            self._at = NEVER
