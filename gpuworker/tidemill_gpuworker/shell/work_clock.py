"""Tells a thread that hangs from one that waits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WorkClock:
    """How long a thread has been at its present piece of work; it has no age while it waits.

    Pieces are short, so that much work is not taken for a hang: one engine step, one message, one
    prompt.  Waiting for a message or for the broker, which has time limits of its own, is no work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at: float | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count what runs in here as one piece of work."""
        self._started_at = self._clock()
        try:
            yield
        finally:
            self._started_at = None

    @property
    def age(self) -> float:
        """Seconds since the present piece of work began, 0 without one."""
        started_at = self._started_at
        return 0.0 if started_at is None else self._clock() - started_at
