"""A stretch of the prefix order: neighbours in parallel arrays, with summaries for cuts."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tidemill_scheduler.intake.jobs import WaitingJob, entry_number

#: Two jobs with one key go in order of this: their pointers' entry numbers, then their ids.
Rank = tuple[int, int, str]


def rank_of(job: WaitingJob) -> Rank:
    """Return what orders jobs of the same routing key."""
    milliseconds, number = entry_number(job.entry_id)
    return (milliseconds, number, job.job_id)


class Chunk:
    """Consecutive entries of a ``PrefixList``, 24 bytes each.

    ```
    keys    k0  k1  k2  ...   the jobs' routing keys, ascending
    jobs    j0  j1  j2  ...
    depths  d0  d1  d2  ...   leading hashes that an entry shares with what runs before it
    works   u0  u1  u2  ...   tokens that remain to be computed then
    ```
    """

    __slots__ = ("_least_depth", "_sums", "depths", "jobs", "keys", "work", "works")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.jobs: list[WaitingJob] = []
        self.depths = array("I")
        self.works = array("I")
        #: The sum of ``works``.
        self.work = 0
        self._sums: Sequence[int] | None = None
        self._least_depth: int | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def sums(self) -> Sequence[int]:
        """The work before each entry, and at last that of all; computed when asked for."""
        if self._sums is None:
            self._sums = list(accumulate(self.works, initial=0))
        return self._sums

    @property
    def least_depth(self) -> int:
        """The lowest of ``depths``; computed when asked for."""
        if self._least_depth is None:
            self._least_depth = min(self.depths)
        return self._least_depth

    def offset_of(self, job: WaitingJob) -> int:
        """Return where the job is or would be inserted."""
        low = bisect_left(self.keys, job.key)
        if low == len(self.keys) or self.jobs[low] is job or self.keys[low] != job.key:
            return low
        high = bisect_right(self.keys, job.key, low)
        rank = rank_of(job)
        # Newcomers have the highest numbers: most of them end a run of equal keys.
        if rank_of(self.jobs[high - 1]) < rank:
            return high
        return bisect_left(self.jobs, rank, low, high, key=rank_of)

    def insert(self, offset: int, job: WaitingJob, depth: int, work: int) -> None:
        """Put an entry in front of the one at ``offset``."""
        self.keys.insert(offset, job.key)
        self.jobs.insert(offset, job)
        self.depths.insert(offset, depth)
        self.works.insert(offset, work)
        self.work += work
        self._forget_summaries()

    def delete(self, offset: int) -> None:
        """Take the entry at ``offset`` out."""
        self.work -= self.works.pop(offset)
        del self.keys[offset], self.jobs[offset]
        del self.depths[offset]
        self._forget_summaries()

    def update(self, offset: int, depth: int, work: int) -> None:
        """Note what an entry shares from now on."""
        self.work += work - self.works[offset]
        self.depths[offset] = depth
        self.works[offset] = work
        self._forget_summaries()

    def split(self, offset: int) -> "Chunk":
        """Cut the entries from ``offset`` on off, into a new chunk."""
        upper = Chunk()
        for name in ("keys", "jobs", "depths", "works"):
            entries = getattr(self, name)
            setattr(upper, name, entries[offset:])
            del entries[offset:]
        upper.work = sum(upper.works)
        self.work -= upper.work
        self._forget_summaries()
        return upper

    def absorb(self, other: "Chunk") -> None:
        """Append the entries of the chunk that follows."""
        self.keys += other.keys
        self.jobs += other.jobs
        self.depths += other.depths
        self.works += other.works
        self.work += other.work
        self._forget_summaries()

    def lowest(self, start: int, end: int, near: int) -> int:
        """Return the offset in ``start..end`` with the least depth, of several the nearest one."""
        depths = self.depths
        least = min(depths[start:end])
        if depths[near] == least:
            return near
        offsets = (i for i in range(start, end) if depths[i] == least)
        return min(offsets, key=lambda offset: abs(offset - near))

    def _forget_summaries(self) -> None:
        self._sums = self._least_depth = None
