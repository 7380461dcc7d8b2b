"""How long workers must have been able to reach the server before their leases count."""

#: A second that the server may have been away takes this many seconds of grace to make good: an
#: outage of a third of a lease or more may have cost a worker both its last beats.
_COST_OF_ABSENCE = 3


class Grace:
    """Lives as long as the process, so that a connection that breaks does not begin it anew.

    Until this process has seen one server for a whole lease, the leases on it may have run out
    because nobody could renew them.  Later the grace lacks three times what the connection was
    away, which is all we know of how long the server was.  Times are monotonic seconds.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._run_id = ""
        self._seen_seconds = 0.0
        self._seen_at = 0.0

    def resume(self, run_id: str, now: float) -> None:
        """Note the first contact on a new connection; ``run_id`` names the server process."""
        absence = now - self._seen_at
        if run_id != self._run_id:
            self._run_id, self._seen_seconds = run_id, 0.0
        self._seen_seconds = max(0.0, self._seen_seconds - _COST_OF_ABSENCE * absence)
        self._seen_at = now

    @property
    def is_over(self) -> bool:
        """Whether none was left at the last contact."""
        return self._seen_seconds >= self._lease_seconds

    def lacks(self, now: float) -> float:
        """Note another contact on the same connection; returns the seconds of grace left."""
        seen = self._seen_seconds + now - self._seen_at
        self._seen_seconds, self._seen_at = min(seen, self._lease_seconds), now
        return self._lease_seconds - self._seen_seconds
