"""Who walks which part of the prefix order."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.prefix_chunk import Rank, rank_of
from tidemill_scheduler.policy.prefix_cuts import Cut, Load


@dataclass(slots=True, eq=False)
class KeyRange:
    """The jobs from the place of ``low`` (none: from the lowest) up to the next range.

    ``count`` of them wait.  ``work`` is their tokens; it may be off by what the first one shares
    with the range before.
    """

    low: WaitingJob | None
    count: int
    work: int
    #: The worker that walks it.
    owner: str | None = None
    #: While it has no owner: workers that will have a part each, to be cut when one needs it.
    team: list[str] = field(default_factory=list)
    #: The first job of the range, if that is known.
    head: WaitingJob | None = field(default=None, repr=False)
    #: Whether it was found not worth cutting; jobs that leave it do not change that.
    is_whole: bool = False

    @property
    def is_free(self) -> bool:
        """Whether it is anyone's."""
        return self.owner is None and not self.team


class KeyRanges:
    """A partition of an order into ranges; each worker has one at most, or part of one.

    ```
    lowest        b                 c                    e
      |--- free ---|---- worker 7 ---|--- team of 2, 6 ---|--- worker 5 --->
    ```
    """

    def __init__(self, whole: Load, team: Sequence[str] = ()) -> None:
        self._ranges = [KeyRange(None, whole.size, whole.work, team=list(team))]
        # The routing key at which each range begins.
        self._keys = [b""]
        self._held = dict.fromkeys(team, self._ranges[0])

    def __iter__(self) -> Iterator[KeyRange]:
        return iter(self._ranges)

    def find(self, job: WaitingJob) -> KeyRange:
        """Return the range that a job is in."""
        return self._ranges[self._position(job)]

    def held_by(self, worker_id: str) -> KeyRange | None:
        """Return the range that the worker owns or has a part in."""
        return self._held.get(worker_id)

    def after(self, key_range: KeyRange) -> KeyRange | None:
        """Return the range that follows, if there is one."""
        position = self._position(key_range.low) + 1
        return self._ranges[position] if position < len(self._ranges) else None

    def assign(self, key_range: KeyRange, worker_id: str) -> None:
        """Give a range to a worker alone, in place of what it had."""
        for holder in (key_range.owner, *key_range.team):
            self._held.pop(holder or "", None)
        self.release(worker_id)
        key_range.team = []
        key_range.owner = worker_id
        self._held[worker_id] = key_range

    def split(self, key_range: KeyRange, cut: Cut, team: Sequence[str] = ()) -> KeyRange:
        """Cut the upper part of a range off as a new one, which ``team`` gets of its team."""
        position = self._position(key_range.low) + 1
        new = KeyRange(cut.job, *cut.above, team=list(team), head=cut.job)
        key_range.count -= cut.above.size
        key_range.work -= cut.above.work
        if team:
            self._held.update(dict.fromkeys(team, new))
            gone = set(team)
            key_range.team = [worker for worker in key_range.team if worker not in gone]
        self._ranges.insert(position, new)
        self._keys.insert(position, cut.job.key)
        return new

    def release(self, worker_id: str) -> None:
        """Take from a worker what it has; an empty range becomes part of its neighbour."""
        key_range = self._held.pop(worker_id, None)
        if key_range is None:
            return
        if key_range.owner == worker_id:
            # Whoever comes next computes its prefix anyway.
            key_range.owner, key_range.is_whole = None, False
        else:
            key_range.team.remove(worker_id)
        if key_range.is_free and key_range.count == 0 and len(self._ranges) > 1:
            self._merge(self._position(key_range.low))

    def _merge(self, position: int) -> None:
        del self._ranges[position], self._keys[position]
        if position == 0:
            self._ranges[0].low = None
            self._keys[0] = b""

    def _position(self, job: WaitingJob | None) -> int:
        key = b"" if job is None else job.key
        high = bisect_right(self._keys, key)
        if high == 1 or self._keys[high - 1] != key:
            return high - 1
        low, rank = bisect_left(self._keys, key, 0, high), _rank_of(job)
        return bisect_right(self._ranges, rank, low, high, key=lambda r: _rank_of(r.low)) - 1


def _rank_of(low: WaitingJob | None) -> Rank:
    return (-1, -1, "") if low is None else rank_of(low)
