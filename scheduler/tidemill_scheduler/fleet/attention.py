"""How long something has been looked at without a break; pure."""

import math


class Attention:
    """Tells a patience that was kept from one that a pause of this process only seems to have kept.

    Times are monotonic seconds.  Looks further apart than ``max_gap`` are a break.
    """

    def __init__(self, max_gap: float) -> None:
        self._max_gap = max_gap
        self._since = self._last = -math.inf

    def look(self, now: float) -> float:
        """Note a look; returns the seconds since the first one after the last break."""
        if self.is_broken(now):
            self._since = now
        self._last = now
        return now - self._since

    def is_broken(self, now: float) -> bool:
        """Whether the last look is too long ago."""
        return now - self._last > self._max_gap
