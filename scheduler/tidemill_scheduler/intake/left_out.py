"""Entries that were read and not kept in memory, to be read again; pure."""

from tidemill_scheduler.intake.jobs import entry_number
from tidemill_scheduler.intake.waiting_line import WaitingLine

#: Entries that may wait in memory, by id alone: of one lane, and of all, but each lane may have
#: what came with its first.
MAX_PER_LANE = 10_000
MAX_WAITING = 100_000

_MAX_SEQUENCE = 2**64 - 1


class LeftOut:
    """Knows from where on entries of a lane were left out, so that others can be read meanwhile."""

    def __init__(self, waiting: WaitingLine) -> None:
        self._waiting = waiting
        # Lane -> the first entry left out.
        self._first: dict[str, str] = {}

    def add(self, lane: str, entry_id: str) -> bool:
        """Leave an entry out if there is no room, or one before it is; returns whether it is."""
        is_full = self._waiting.num_in(lane) >= MAX_PER_LANE or len(self._waiting) >= MAX_WAITING
        if is_full or lane in self._first:
            self._first.setdefault(lane, entry_id)
        return lane in self._first

    def rewind(self) -> str | None:
        """Return the position behind which to read again once some lane has room, else None."""
        if not any(map(self._has_room, self._first)):
            return None
        first = min(map(entry_number, self._first.values()))
        self._first.clear()
        return _before(*first)

    def _has_room(self, lane: str) -> bool:
        # Much of it, for all that comes later is read again.
        num_entries = self._waiting.num_in(lane)
        has_much = num_entries <= MAX_PER_LANE // 2 and len(self._waiting) <= MAX_WAITING // 2
        return not num_entries or has_much


def _before(ms: int, sequence: int) -> str:
    return f"{ms}-{sequence - 1}" if sequence else f"{ms - 1}-{_MAX_SEQUENCE}"
