"""When to start processes again that died: at once, then ever later; pure, but for its clock."""

import math
import time
from collections.abc import Callable

from tidemill.cli.child import ChildSpec

#: A process that died so long after its last death is started again at once.
STABLE_SECONDS = 30.0
MAX_DELAY_SECONDS = 10.0


class Backoff:
    """How long to wait before starting one process again."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._delay = 0.0

    def delay_after_death(self, now: float) -> float:
        """Return the delay before the restart after a death at ``now``."""
        if now - self._last > STABLE_SECONDS:
            self._delay = 0.0
        else:
            self._delay = min(2 * self._delay + 0.5, MAX_DELAY_SECONDS)
        self._last = now
        return self._delay


class Restarts:
    """The restarts to come; each process waits for its own, none for another's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._backoffs: dict[str, Backoff] = {}
        self._due: dict[str, tuple[float, ChildSpec]] = {}

    def died(self, spec: ChildSpec) -> None:
        """Plan the restart of a process that died just now."""
        now = self._clock()
        delay = self._backoffs.setdefault(spec.name, Backoff()).delay_after_death(now)
        self._due[spec.name] = (now + delay, spec)

    def next_in_seconds(self) -> float | None:
        """Return how long until the next restart is due; None if there is none to come."""
        if not self._due:
            return None
        return max(0.0, min(due for due, _ in self._due.values()) - self._clock())

    def take_due(self) -> list[ChildSpec]:
        """Return, once each, the processes to start now."""
        now = self._clock()
        ready = [spec for due, spec in self._due.values() if due <= now]
        for spec in ready:
            del self._due[spec.name]
        return ready
