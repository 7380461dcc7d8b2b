"""Fair shares of many servers among many keys: pure, no clock."""

import itertools
import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

Key = TypeVar("Key", bound=Hashable)
Server = TypeVar("Server", bound=Hashable)

#: Places of keys that are new in the rotation lie so far before all others.
_AHEAD = 1 << 62

#: So many times fewer keys than there are in the rotation are looked up one by one, not walked to.
_FEW = 16

#: So many keys may come ahead of the rotation before it must go on.
_MAX_AHEAD = 16

_MIN_REMEMBERED = 1024


@dataclass(slots=True, eq=False)
class _Share(Generic[Key]):
    """``carry`` is what the key may use beyond its next portions, or owes if it is negative."""

    key: Key
    weight: float
    portion: float
    carry: float = 0.0
    place: int = 0
    visitors: set[Hashable] = field(default_factory=set)
    #: When it had its last turn and when it went idle, in rounds of the rotation.
    turned_at: float = -math.inf
    idle_since: float = 0.0

    def debt_at(self, rounds: float) -> float:
        """What it still owes if it stays idle until then; others have had turns meanwhile."""
        return min(0.0, self.carry + self.portion * (rounds - self.idle_since))


@dataclass(slots=True, eq=False)
class _Visit(Generic[Key]):
    share: _Share[Key]
    portion: float
    left: float
    place_before: int
    is_used: bool = False


class DeficitRoundRobin(Generic[Key, Server]):
    """Deficit round robin (Shreedhar and Varghese 1996) with many servers in one rotation.

    A server visits a key until it has used ``quantum * weight`` tokens there, and may go beyond
    that by its last job; what it used too much goes off the key's next turns.  Several servers may
    visit one key at a time, each for a portion of its own.  A key is behind all others once a
    visit to it has begun.  One that comes after a whole round without a turn is ahead of all that
    had one, as the sparse flows of FQ-CoDel are (RFC 8290), so that it need not wait for a round;
    those who do so get no more turns than the rest.

    Bound: let two keys become active without debt or credit, and stay active and open to all
    servers.  Then their services divided by their weights differ by at most
    ``num_servers * (quantum + max_job / min(weights))`` at any time, whatever other keys do.  For:
    turns of the two alternate, so that their numbers differ by one at most.  After k turns the
    service of a key is k portions, less what its m open visits have left, a portion each at most,
    plus its debt, below one job for each of the other servers: visits begin only where the debt is
    less than a portion, and take it over.  And where one key is a turn ahead, the server of that
    turn has no open visit to the other.  For keys that are open to some servers only, the same
    holds with the number of those that both are open to, if they are the same for both.

    Corrections by ``adjust`` and charges without a visit come on top until they are paid back.

    Costs, with n active keys: a turn that goes on and a charge O(1), all else O(log n).  On top of
    it come turns that are passed over because of debt, at most one for each portion that was ever
    charged, and with ``among`` a look at each key before the one found, or at each of ``among`` if
    those are few.
    """

    def __init__(self, quantum: float) -> None:
        if not quantum > 0:
            raise ValueError(f"quantum is {quantum}, but must be positive")
        self._quantum = quantum
        self._shares: dict[Key, _Share[Key]] = {}
        self._idle: dict[Key, _Share[Key]] = {}
        self._max_idle = _MIN_REMEMBERED
        self._order: SortedDict[int, _Share[Key]] = SortedDict()
        self._places = itertools.count()
        self._visits: dict[Hashable, _Visit[Key]] = {}
        self._skipped: dict[Server, set[Key]] = {}
        self._rounds = 0.0
        self._num_places_ahead = _MAX_AHEAD

    def __len__(self) -> int:
        return len(self._shares)

    def __contains__(self, key: object) -> bool:
        return key in self._shares

    def activate(self, key: Key, weight: float = 1.0) -> None:
        """Let a key take part from now on, or change its weight; raises ``ValueError``."""
        if not 0 < weight < math.inf:
            raise ValueError(f"weight of {key!r} is {weight}, but must be positive")
        share = self._shares.get(key)
        if share is None:
            share = self._admit(key)
        share.weight, share.portion = weight, weight * self._quantum

    def deactivate(self, key: Key) -> None:
        """Take a key out: it keeps its debt and loses its credit; raises ``KeyError``.

        Charge it for its last job before.
        """
        share = self._shares.pop(key)
        for server in share.visitors:
            del self._visits[server]
        share.visitors.clear()
        del self._order[share.place]
        share.carry, share.idle_since = min(0.0, share.carry), self._rounds
        self._remember(share)

    def turn(self, server: Server, among: Collection[Key] | None = None) -> Key | None:
        """Return whose turn it is on a server: that of the open visit, else of the next key.

        ``among`` are the keys that have something for this server; the others keep their places.
        None if there is none but those skipped since the server's last charge; the next call looks
        at these again.
        """
        visit = self._visits.get(server)
        if visit is not None:
            if among is None or visit.share.key in among:
                return visit.share.key
            self._end(server, visit)
        share = self._choose(among, self._skipped.get(server, ()))
        if share is None:
            self._skipped.pop(server, None)
            return None
        self._begin(server, share)
        return share.key

    def charge(self, server: Server, key: Key, tokens: float) -> None:
        """Count what a server gives to a key, be it on a visit or not."""
        self._skipped.pop(server, None)
        visit = self._visits.get(server)
        if visit is None or visit.share.key != key:
            self.adjust(key, tokens)
            return
        if not visit.is_used:
            visit.is_used = True
            self._count_turns(int(visit.place_before >= 0))
            visit.share.turned_at = self._rounds
        visit.left -= tokens
        if visit.left <= 0:
            self._end(server, visit)

    def adjust(self, key: Key, tokens: float) -> None:
        """Count ``tokens`` more than was charged, or fewer if negative; idle keys earn nothing."""
        share = self._shares.get(key)
        if share is not None:
            share.carry -= tokens
            return
        share = self._idle.get(key) or _Share(key, 1.0, self._quantum, idle_since=self._rounds)
        share.carry = min(0.0, share.debt_at(self._rounds) - tokens)
        share.idle_since = self._rounds
        self._remember(share)

    def debt(self, key: Key) -> float:
        """Return the tokens for which a key passes turns, 0 if it has its next one."""
        share = self._shares.get(key)
        return 0.0 if share is None else max(0.0, -(share.carry + share.portion))

    def rounds_behind(self, key: Key) -> float:
        """Return how many rounds of the rotation an active key has had no turn; 0 before its first.

        More than one, if servers had to skip it.  Raises ``KeyError``.
        """
        turned_at = self._shares[key].turned_at
        return 0.0 if turned_at == -math.inf else self._rounds - turned_at

    def skip(self, server: Server) -> None:
        """End a server's visit because the key has nothing for it.

        A visit without a charge has not been, and the key is where it was; else it keeps what was
        left, up to one portion.  The server is not sent there again before its next charge.  Each
        turn walks past the keys that are skipped: where there may be many, pass ``among``.
        """
        visit = self._visits.get(server)
        if visit is not None:
            self._skipped.setdefault(server, set()).add(visit.share.key)
            self._end(server, visit)

    def remove_server(self, server: Server) -> None:
        """Forget a server."""
        self.skip(server)
        self._skipped.pop(server, None)

    def _admit(self, key: Key) -> _Share[Key]:
        share = self._idle.pop(key, None) or _Share(key, 1.0, self._quantum)
        share.carry = share.debt_at(self._rounds)
        share.place = next(self._places)
        if self._num_places_ahead > 0 and self._rounds - share.turned_at >= 1:
            self._num_places_ahead -= 1
            share.place -= _AHEAD
        self._order[share.place] = share
        self._shares[key] = share
        return share

    def _remember(self, share: _Share[Key]) -> None:
        self._idle[share.key] = share
        if len(self._idle) <= self._max_idle:
            return
        self._idle = {key: idle for key, idle in self._idle.items() if self._matters(idle)}
        self._max_idle = max(_MIN_REMEMBERED, 2 * len(self._idle))

    def _matters(self, idle: _Share[Key]) -> bool:
        return idle.debt_at(self._rounds) < 0 or self._rounds - idle.turned_at < 1

    def _choose(
        self, among: Collection[Key] | None, skipped: Collection[Key]
    ) -> _Share[Key] | None:
        """The first key that is out of debt; those before it have passed a turn."""
        while True:
            passed, chosen = [], None
            for share in self._eligible(among):
                if share.key in skipped:
                    continue
                if share.carry + share.portion > 0:
                    chosen = share
                    break
                passed.append(share)
            if not (chosen or passed):
                return None
            if chosen:
                self._pass(passed)
                return chosen
            # All pass as many turns, which leaves their order as it is.
            self._credit(passed, min(int(-s.carry // s.portion) for s in passed))

    def _eligible(self, among: Collection[Key] | None) -> Iterable[_Share[Key]]:
        """In the order of the rotation, which must not be changed meanwhile."""
        shares: Iterable[_Share[Key]] = self._order.values()
        if among is None:
            return shares
        if len(among) * _FEW < len(self._shares):
            found = (self._shares[key] for key in among if key in self._shares)
            return sorted(found, key=lambda share: share.place)
        return (share for share in shares if share.key in among)

    def _pass(self, shares: list[_Share[Key]]) -> None:
        self._credit(shares, 1)
        for share in shares:
            self._move(share, next(self._places))

    def _credit(self, shares: list[_Share[Key]], num_turns: int) -> None:
        self._count_turns(num_turns * sum(share.place >= 0 for share in shares))
        for share in shares:
            share.carry += num_turns * share.portion
            share.turned_at = self._rounds

    def _begin(self, server: Server, share: _Share[Key]) -> None:
        extra = min(share.carry, share.portion)
        share.carry -= extra
        self._visits[server] = _Visit(share, share.portion, share.portion + extra, share.place)
        share.visitors.add(server)
        self._move(share, next(self._places))

    def _end(self, server: Server, visit: _Visit[Key]) -> None:
        share = visit.share
        del self._visits[server]
        share.visitors.discard(server)
        if not visit.is_used:
            share.carry += visit.left - visit.portion
            self._move(share, min(share.place, visit.place_before))
        elif visit.left <= 0:
            share.carry += visit.left
        else:
            share.carry = max(share.carry, min(share.carry + visit.left, share.portion))

    def _move(self, share: _Share[Key], place: int) -> None:
        del self._order[share.place]
        share.place = place
        self._order[place] = share

    def _count_turns(self, num_turns: int) -> None:
        """Count turns in the rotation; those of keys that are ahead of it do not bring it round."""
        self._rounds += num_turns / len(self._shares)
        self._num_places_ahead = min(self._num_places_ahead + num_turns, _MAX_AHEAD)
