"""What the scheduler says of prefixes that waiting jobs will use."""

from collections import OrderedDict
from collections.abc import Iterator

#: Hints remembered at a time; the oldest one is forgotten for a new one.
MAX_HINTS = 4096


class Hints:
    """Hinted routing hashes, the one that was given longest ago first.

    ``now`` is any count that only grows; a hint that was not repeated for more than ``lifetime``
    of it lapses.
    """

    def __init__(self, lifetime: int) -> None:
        self._lifetime = lifetime
        self._given_at: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._given_at

    def note(self, digest: bytes, now: int) -> bytes | None:
        """Remember a hint; returns the one that had to be forgotten for it."""
        self._given_at[digest] = now
        self._given_at.move_to_end(digest)
        if len(self._given_at) <= MAX_HINTS:
            return None
        return self._given_at.popitem(last=False)[0]

    def forget(self, digest: bytes) -> None:
        """Drop a hint, if it is there."""
        self._given_at.pop(digest, None)

    def lapsed(self, now: int) -> Iterator[bytes]:
        """Take out the hints that were not repeated for too long."""
        while self._given_at:
            digest, given_at = next(iter(self._given_at.items()))
            if now - given_at <= self._lifetime:
                return
            del self._given_at[digest]
            yield digest
