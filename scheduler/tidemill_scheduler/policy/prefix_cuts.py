"""Where a part of the prefix order is best cut: near a share of its work, through little prefix."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.prefix_chunk import Chunk
from tidemill_scheduler.policy.prefix_list import Place

#: Chunks on either side of the middle that are looked at for a cut.
_MAX_REACH = 64


class Load(NamedTuple):
    """So many entries of the order with so many tokens of work."""

    size: int
    work: int


class Cut(NamedTuple):
    """A cut in front of ``job``, through ``depth`` shared hashes; ``above`` is from there on."""

    job: WaitingJob
    depth: int
    above: Load


class PrefixCuts:
    """The places where the entries from ``low`` up to ``high`` may be cut in two.

    Good until the list of ``chunks`` changes.
    """

    def __init__(self, chunks: Sequence[Chunk], low: Place, high: Place) -> None:
        self._chunks = chunks[low[0] : high[0] + 1]
        self._first = low[0]
        # Before each chunk, and at last before what follows all of them.
        self._works = list(accumulate((chunk.work for chunk in self._chunks), initial=0))
        self._counts = list(accumulate((len(chunk) for chunk in self._chunks), initial=0))
        self._start = self._before((0, low[1]))
        self._end = self._before((high[0] - low[0], high[1]))

    @property
    def load(self) -> Load:
        """All that stands between the two ends."""
        return _between(self._start, self._end)

    def at(self, place: Place) -> Cut | None:
        """Return the cut at a place of the list, none if that has nothing below or above it."""
        place = (place[0] - self._first, place[1])
        if not 0 <= place[0] < len(self._chunks):
            return None
        before = self._before(place)
        if not self._start.size < before.size < self._end.size:
            return None
        return self._cut(place)

    def best(self, work: float, reach: float, *, num_below: int = 1, num_above: int = 1) -> Cut:
        """Return the shallowest of the cuts with ``work`` +- ``reach`` tokens below it.

        Of several it is the one nearest to ``work``; if there is none within reach, the nearest.
        At least ``num_below`` and ``num_above`` entries stand on its sides, and so many there are.
        """
        work += self._start.work
        first = self._place(self._start.size + num_below)
        last = self._place(self._end.size - num_above)
        middle = min(max(self._nearest(work), first), last)
        low = min(max(self._at_least(work - reach), first), middle)
        high = max(min(self._at_most(work + reach), last), middle)
        return self._cut(self._shallowest(low, middle, high))

    def _cut(self, place: Place) -> Cut:
        chunk = self._chunks[place[0]]
        above = _between(self._before(place), self._end)
        return Cut(chunk.jobs[place[1]], chunk.depths[place[1]], above)

    def _shallowest(self, low: Place, middle: Place, high: Place) -> Place:
        best = middle
        depth = self._chunks[middle[0]].depths[middle[1]]
        for index in _outwards(low[0], middle[0], high[0]):
            if not depth:
                break
            chunk = self._chunks[index]
            start = low[1] if index == low[0] else 0
            end = high[1] + 1 if index == high[0] else len(chunk)
            if end - start == len(chunk) and chunk.least_depth >= depth:
                continue
            near = middle[1] if index == middle[0] else start if index > middle[0] else end - 1
            offset = chunk.lowest(start, end, near)
            if chunk.depths[offset] < depth:
                best, depth = (index, offset), chunk.depths[offset]
        return best

    def _before(self, place: Place) -> Load:
        index, offset = place
        if not offset:
            return Load(self._counts[index], self._works[index])
        work = self._works[index] + self._chunks[index].sums[offset]
        return Load(self._counts[index] + offset, work)

    def _place(self, number: int) -> Place:
        index = bisect_right(self._counts, number) - 1
        return (index, number - self._counts[index])

    def _nearest(self, work: float) -> Place:
        index = self._chunk_at(work)
        sums, rest = self._chunks[index].sums, work - self._works[index]
        offset = bisect_left(sums, rest, 0, len(sums) - 1)
        if offset and rest - sums[offset - 1] < sums[offset] - rest:
            offset -= 1
        return self._normal(index, offset)

    def _at_least(self, work: float) -> Place:
        """The first place that has ``work`` or more before it."""
        index = self._chunk_at(work)
        offset = bisect_left(self._chunks[index].sums, work - self._works[index])
        return self._normal(index, offset)

    def _at_most(self, work: float) -> Place:
        """The last place that has ``work`` or less before it."""
        index = self._chunk_at(work)
        chunk = self._chunks[index]
        offset = bisect_right(chunk.sums, work - self._works[index], 0, len(chunk))
        return (index, max(0, offset - 1))

    def _normal(self, index: int, offset: int) -> Place:
        return (index, offset) if offset < len(self._chunks[index]) else (index + 1, 0)

    def _chunk_at(self, work: float) -> int:
        index = bisect_right(self._works, work) - 1
        return min(max(index, 0), len(self._chunks) - 1)


def _between(start: Load, end: Load) -> Load:
    return Load(end.size - start.size, end.work - start.work)


def _outwards(low: int, middle: int, high: int) -> Iterator[int]:
    yield middle
    for distance in range(1, min(max(middle - low, high - middle), _MAX_REACH) + 1):
        if middle + distance <= high:
            yield middle + distance
        if middle - distance >= low:
            yield middle - distance
