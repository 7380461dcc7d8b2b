"""How long workers must have been able to reach the server before their leases count."""

from dataclasses import dataclass

#: A second that the server may have been away takes this many seconds of grace to make good: an
#: outage of a third of a lease or more may have cost a worker both its last beats.
_COST_OF_ABSENCE = 3
#: Share of a lease that two contacts may be apart.  What is longer is no contact but an absence:
#: we, the server or the whole machine stood still, and so may the workers have.
_MAX_GAP = 1 / 4


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment by two clocks, in seconds: our monotonic one and the server's.

    Ours may stand still while a machine sleeps, the server's is the one that leases run by.
    """

    here: float
    there: float

    def since(self, earlier: "Moment") -> float:
        """Return how long ago a moment was, by the clock that says the most."""
        return max(self.here - earlier.here, self.there - earlier.there)


class Grace:
    """Lives as long as the process, so that a connection that breaks does not begin it anew.

    Until this process has seen one server for a whole lease, the leases on it may have run out
    because nobody could renew them.  Later the grace lacks three times what the contact was
    interrupted, which is all we know of how long the server was away.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._run_id = ""
        self._seen_seconds = 0.0
        self._seen_at = Moment(0.0, 0.0)

    def resume(self, run_id: str, now: Moment) -> None:
        """Note the first contact on a new connection; ``run_id`` names the server process."""
        if run_id != self._run_id:
            self._run_id, self._seen_seconds = run_id, 0.0
        self._note_absence(now.since(self._seen_at))
        self._seen_at = now

    def is_over(self, now: Moment) -> bool:
        """Whether none was left at the last contact, and that was a moment ago."""
        is_recent = now.since(self._seen_at) <= self._max_gap
        return is_recent and self._seen_seconds >= self._lease_seconds

    def lacks(self, now: Moment) -> float:
        """Note another contact on the same connection; returns the seconds of grace left."""
        gap = now.since(self._seen_at)
        if gap > self._max_gap:
            self._note_absence(gap)
        else:
            self._seen_seconds = min(self._seen_seconds + gap, self._lease_seconds)
        self._seen_at = now
        return self._lease_seconds - self._seen_seconds

    @property
    def _max_gap(self) -> float:
        return self._lease_seconds * _MAX_GAP

    def _note_absence(self, seconds: float) -> None:
        self._seen_seconds = max(0.0, self._seen_seconds - _COST_OF_ABSENCE * seconds)
