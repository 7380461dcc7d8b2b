"""Which batches have the places of a runner, so that no tenant waits for all of another's; pure."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemill_scheduler.batches.lease import BatchName


@dataclass(frozen=True, slots=True)
class Moves:
    """Batches to begin now, and those that give their places back for them."""

    begin: tuple[BatchName, ...] = ()
    give_back: tuple[BatchName, ...] = ()


class Places:
    """Who has a place, since when, and whose turn it is; times are of one monotonic clock, in s.

    A batch that gives its place back finishes what it has begun beside the one that gets it.  There
    are at most twice as many such batches as places, and no tenant has more batches of either kind
    than there are places.
    """

    def __init__(self, num_places: int, turn_seconds: float) -> None:
        self._num_places, self._turn_seconds = num_places, turn_seconds
        #: When each batch got its place; in that order.
        self._held: dict[BatchName, float] = {}
        self._leaving: set[BatchName] = set()
        #: The number of the last place that each tenant got, counted from 1.
        self._served: dict[str, int] = {}
        self._num_taken = 0
        #: Until when a batch is taken for another runner's.
        self._elsewhere: dict[BatchName, float] = {}

    def moves(self, waiting: Sequence[BatchName], now: float) -> Moves:
        """Decide what happens next; a tenant's batches are begun in the order in which they wait.

        The tenant with the fewest places goes first, among equals the one that got its last place
        before the others.  Where none is free, a tenant who has two places more gives one back.
        For a tenant without any the oldest batch does that, once it had its turn.  What another
        runner seems to work on gets what is left.
        """
        doubtful = [name for name in waiting if now < self._elsewhere.get(name, now)]
        queues = _by_tenant(waiting, doubtful)
        held, leaving = dict(self._held), set(self._leaving)
        busy = Counter(name.tenant for name in (*held, *leaving))
        begin: list[BatchName] = []
        while queues:
            tenant = min(queues, key=lambda each: (busy[each], self._served.get(each, 0)))
            num_own = busy[tenant]
            if num_own >= self._num_places or not self._make_room(held, leaving, num_own, now):
                break
            name = _pop(queues, tenant)
            held[name] = now
            busy[tenant] += 1
            begin.append(name)
        begin += doubtful[: max(0, self._num_places - len(held))]
        return Moves(tuple(begin), tuple(leaving - self._leaving))

    def take(self, name: BatchName, now: float) -> None:
        """Give a batch a place."""
        self._held[name] = now
        self._num_taken += 1
        self._served[name.tenant] = self._num_taken

    def give_back(self, name: BatchName) -> None:
        """Take a batch's place away, which goes on until it has finished what it has begun."""
        del self._held[name]
        self._leaving.add(name)

    def leave(self, name: BatchName) -> None:
        """Note that nothing is done for a batch any more."""
        self._held.pop(name, None)
        self._leaving.discard(name)

    def doubt(self, name: BatchName, until: float) -> None:
        """Note that another runner works on a batch; nothing makes room for it for a while."""
        self._elsewhere[name] = until

    def keep_only(self, names: Iterable[BatchName]) -> None:
        """Forget all other batches that have no place, and the turns of tenants without any."""
        known = {*names, *self._held, *self._leaving}
        tenants = {name.tenant for name in known}
        self._elsewhere = {n: until for n, until in self._elsewhere.items() if n in known}
        self._served = {t: served for t, served in self._served.items() if t in tenants}

    @property
    def num_busy(self) -> int:
        """Batches that have a place, or have given it back and go on."""
        return len(self._held) + len(self._leaving)

    def _make_room(
        self, held: dict[BatchName, float], leaving: set[BatchName], num_own: int, now: float
    ) -> bool:
        """See to a free place for a tenant who has ``num_own``; false if there is none."""
        if len(held) < self._num_places:
            return True
        loser = self._loser(held, num_own, now)
        if loser is None or len(leaving) >= 2 * self._num_places:
            return False
        del held[loser]
        leaving.add(loser)
        return True

    def _loser(self, held: Mapping[BatchName, float], num_own: int, now: float) -> BatchName | None:
        """Return which batch gives its place back for a tenant who has ``num_own``, if any."""
        [(tenant, most)] = Counter(name.tenant for name in held).most_common(1)
        if most >= num_own + 2:
            return [name for name in held if name.tenant == tenant][-1]
        oldest = next(iter(held))
        had_its_turn = now - held[oldest] >= self._turn_seconds
        return oldest if num_own == 0 and had_its_turn else None


def _pop(queues: dict[str, deque[BatchName]], tenant: str) -> BatchName:
    name = queues[tenant].popleft()
    if not queues[tenant]:
        del queues[tenant]
    return name


def _by_tenant(
    waiting: Iterable[BatchName], doubtful: Collection[BatchName]
) -> dict[str, deque[BatchName]]:
    queues: dict[str, deque[BatchName]] = {}
    for name in waiting:
        if name not in doubtful:
            queues.setdefault(name.tenant, deque()).append(name)
    return queues
