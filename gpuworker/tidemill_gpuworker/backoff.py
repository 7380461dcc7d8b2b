"""How long to wait before something that fails is tried again."""

_FIRST_SECONDS = 0.05
_LAST_SECONDS = 2.0


class Backoff:
    """Delays in seconds that double with each failure in a row, up to a bound."""

    def __init__(self) -> None:
        self._num_failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._num_failures > 0

    def failed(self) -> float:
        """Note a failure; returns the delay before the next try."""
        delay = min(_LAST_SECONDS, _FIRST_SECONDS * 2.0 ** min(self._num_failures, 10))
        self._num_failures += 1
        return delay

    def worked(self) -> None:
        """Note a success: the next failure is the first one again."""
        self._num_failures = 0
