"""Where a prefix order is best cut: near a share of its work, through little shared prefix."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.policy.prefix_chunk import Chunk
from tidemill_scheduler.policy.prefix_list import Place

#: Chunks on either side of the middle that are looked at for a cut.
_MAX_REACH = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """What stands before a place of the list: so many entries with so many tokens of work."""

    count: int
    work: int


NOTHING = Mark(0, 0)


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where the list may be cut: in front of ``job``, through ``depth`` shared hashes."""

    place: Place
    job: WaitingJob
    depth: int
    mark: Mark


class PrefixCuts:
    """Finds places by work in the chunks of a list, which must not change meanwhile."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._works = list(accumulate((chunk.work for chunk in chunks), initial=0))
        self._counts = list(accumulate((len(chunk) for chunk in chunks), initial=0))

    def mark(self, place: Place) -> Mark:
        """Return what stands before a place."""
        index, offset = place
        if not offset:
            return Mark(self._counts[index], self._works[index])
        work = self._works[index] + self._chunks[index].sums[offset]
        return Mark(self._counts[index] + offset, work)

    def place(self, number: int) -> Place:
        """Return the place that has ``number`` entries before it."""
        index = bisect_right(self._counts, number) - 1
        return (index, number - self._counts[index])

    def even_cuts(self, num_parts: int, tolerance: float) -> list[Cut]:
        """Cut the list into at most so many parts of about equal work.

        A cut is the shallowest of those within ``tolerance`` of a part's work around the even one.
        """
        cuts: list[Cut] = []
        share = self._works[-1] / num_parts
        last = self.place(self._counts[-1] - 1)
        first = self.place(1)
        for part in range(1, num_parts):
            if first > last:
                break
            cut = self.best_cut(part * share, tolerance * share, first, last)
            cuts.append(cut)
            first = self.place(cut.mark.count + 1)
        return cuts

    def best_cut(self, work: float, reach: float, first: Place, last: Place) -> Cut:
        """Return the shallowest cut in ``first..last`` with ``work`` +- ``reach`` before it.

        Of several it is the one nearest to ``work``; if there is none within reach, the nearest.
        """
        middle = min(max(self._nearest(work), first), last)
        low = min(max(self._at_least(work - reach), first), middle)
        high = max(min(self._at_most(work + reach), last), middle)
        index, offset = place = self._shallowest(low, middle, high)
        chunk = self._chunks[index]
        return Cut(place, chunk.jobs[offset], chunk.depths[offset], self.mark(place))

    def _shallowest(self, low: Place, middle: Place, high: Place) -> Place:
        best = middle
        depth = self._chunks[middle[0]].depths[middle[1]]
        for index in _outwards(low[0], middle[0], high[0]):
            if not depth:
                break
            chunk = self._chunks[index]
            if chunk.least_depth >= depth:
                continue
            start = low[1] if index == low[0] else 0
            end = high[1] + 1 if index == high[0] else len(chunk)
            near = middle[1] if index == middle[0] else start if index > middle[0] else end - 1
            offset = chunk.lowest(start, end, near)
            if chunk.depths[offset] < depth:
                best, depth = (index, offset), chunk.depths[offset]
        return best

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


def _outwards(low: int, middle: int, high: int) -> Iterator[int]:
    yield middle
    for distance in range(1, min(max(middle - low, high - middle), _MAX_REACH) + 1):
        if middle + distance <= high:
            yield middle + distance
        if middle - distance >= low:
            yield middle - distance
