"""Who walks which part of the prefix order."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.policy.prefix_chunk import Rank, rank_of
from tidemill_scheduler.policy.prefix_cuts import NOTHING, Cut, Mark


@dataclass(slots=True, eq=False)
class KeyRange:
    """The jobs from the place of ``low`` (none: from the lowest) up to the next range.

    ``count`` of them wait.  ``work`` is their tokens; it may be off by what the first one shares
    with the range before.
    """

    low: WaitingJob | None
    count: int
    work: int
    owner: str | None = None
    #: The first job of the range, if that is known.
    head: WaitingJob | None = field(default=None, repr=False)


class KeyRanges:
    """A partition of an order into ranges, at most one for each worker.

    ```
    lowest        b                 c                    e
      |--- none ---|---- worker 7 ---|----- worker 2 -----|--- worker 5 --->
    ```
    """

    def __init__(self, cuts: Sequence[Cut] = (), whole: Mark = NOTHING) -> None:
        self._owned: dict[str, KeyRange] = {}
        lows = [None, *(cut.job for cut in cuts)]
        starts = [NOTHING, *(cut.mark for cut in cuts)]
        ends = [*(cut.mark for cut in cuts), whole]
        self._ranges = [
            KeyRange(low, end.count - start.count, end.work - start.work, head=low)
            for low, start, end in zip(lows, starts, ends, strict=True)
        ]
        self._keys = [_key_of(low) for low in lows]

    def __iter__(self) -> Iterator[KeyRange]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def find(self, job: WaitingJob) -> KeyRange:
        """Return the range that a job is in."""
        return self._ranges[self._position(job)]

    def find_key(self, key: bytes) -> KeyRange:
        """Return the range behind whose low, or at it, a key is."""
        return self._ranges[max(0, bisect_right(self._keys, key) - 1)]

    def owned_by(self, worker_id: str) -> KeyRange | None:
        """Return the worker's range, if it has one."""
        return self._owned.get(worker_id)

    def after(self, key_range: KeyRange) -> KeyRange | None:
        """Return the range that follows, if there is one."""
        position = self._position(key_range.low) + 1
        return self._ranges[position] if position < len(self._ranges) else None

    def assign(self, key_range: KeyRange, worker_id: str) -> None:
        """Give a range to a worker, in place of the one it had."""
        self.release(worker_id)
        if key_range.owner is not None:
            del self._owned[key_range.owner]
        key_range.owner = worker_id
        self._owned[worker_id] = key_range

    def split(self, key_range: KeyRange, low: WaitingJob, upper: Mark) -> KeyRange:
        """Cut the part of a range from ``low`` on, which holds ``upper``, off as a new one."""
        position = self._position(key_range.low) + 1
        new = KeyRange(low, upper.count, upper.work, head=low)
        key_range.count -= upper.count
        key_range.work -= upper.work
        self._ranges.insert(position, new)
        self._keys.insert(position, low.key)
        return new

    def release(self, worker_id: str) -> None:
        """Take a worker's range from it; an empty one becomes part of its neighbour."""
        key_range = self._owned.pop(worker_id, None)
        if key_range is None:
            return
        key_range.owner = None
        if key_range.count == 0 and len(self._ranges) > 1:
            self._merge(self._position(key_range.low))

    def _merge(self, position: int) -> None:
        del self._ranges[position], self._keys[position]
        if position == 0:
            self._ranges[0].low = None
            self._keys[0] = b""

    def _position(self, job: WaitingJob | None) -> int:
        key = _key_of(job)
        high = bisect_right(self._keys, key)
        if high == 1 or self._keys[high - 1] != key:
            return high - 1
        low = bisect_left(self._keys, key, 0, high)
        position = bisect_right(
            self._ranges, _rank_of(job), low, high, key=lambda r: _rank_of(r.low)
        )
        return position - 1


def _key_of(low: WaitingJob | None) -> bytes:
    return b"" if low is None else low.key


def _rank_of(low: WaitingJob | None) -> Rank:
    return (-1, -1, "") if low is None else rank_of(low)
