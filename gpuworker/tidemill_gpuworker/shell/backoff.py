"""How long to wait before something that fails is tried again."""

_FIRST_SECONDS = 0.05
#: The longest delay, where nobody asks for a shorter one.
LAST_SECONDS = 2.0


class Backoff:
    """Delays in seconds that double with each failure in a row, up to ``last_seconds``."""

    def __init__(self, last_seconds: float = LAST_SECONDS) -> None:
        self._last_seconds = last_seconds
        self._num_failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._num_failures > 0

    def failed(self) -> float:
        """Note a failure; returns the delay before the next try."""
        delay = min(self._last_seconds, _FIRST_SECONDS * 2.0 ** min(self._num_failures, 10))
        self._num_failures += 1
        return delay

    def worked(self) -> None:
        """Note a success: the next failure is the first one again."""
        self._num_failures = 0
