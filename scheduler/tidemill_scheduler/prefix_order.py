"""The order in which waiting jobs are dispatched: depth-first over their shared prefixes.

Routing keys are chained hashes, so the lexicographic order of the keys is the depth-first order of
the radix tree over all prompts: one sorted list stands for the trie, and what two neighbours share
is a binary search.  Workers walk it as an elevator does, in epochs (N-step SCAN): a snapshot is
served to its end while newcomers gather for the next one.
"""

from collections.abc import Callable
from itertools import pairwise

from sortedcontainers import SortedList

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.jobs import SortKey, WaitingJob
from tidemill_scheduler.key_ranges import LOWEST, KeyRange, KeyRanges

#: Routing hashes (of 64 tokens each at block size 16) from which a shared prefix makes a group.
GROUP_DEPTH = 2
_GROUP_BYTES = GROUP_DEPTH * ROUTING_HASH_BYTES

#: Work that may join a running epoch, as a share of the work it began with.
JOIN_SHARE = 0.25

#: Places around the middle of a range that are compared for the best cut.
_CUT_WINDOW = 64


def shared_depth(left: bytes, right: bytes) -> int:
    """Return how many leading routing hashes two keys share.

    Equal hashes at one depth imply equal hashes below, hence the binary search.
    """
    low, high = 0, min(len(left), len(right)) // ROUTING_HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * ROUTING_HASH_BYTES
        if left[end - ROUTING_HASH_BYTES : end] == right[end - ROUTING_HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low


def in_one_group(left: bytes, right: bytes) -> bool:
    """Whether two keys share a prefix that is worth keeping on one worker."""
    return len(left) >= _GROUP_BYTES and left[:_GROUP_BYTES] == right[:_GROUP_BYTES]


class PrefixOrder:
    """Jobs of one model and one priority; ``anchors`` maps worker id -> its last job's key.

    Bound on waiting: a job that arrives in epoch e is dispatched before epoch e + 1 ends, so at
    most 1.25 x (W_e + W_e+1) tokens of work go before it, W being what an epoch began with.
    """

    def __init__(self, anchors: dict[str, bytes]) -> None:
        self._anchors = anchors
        self._jobs: dict[str, WaitingJob] = {}
        self._current: SortedList[SortKey] = SortedList()
        self._next: SortedList[SortKey] = SortedList()
        self._ranges = KeyRanges()
        self._next_work = 0
        self._joinable_work = 0.0
        #: How many epochs began.
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: WaitingJob) -> None:
        """Let a job wait: in this epoch if it extends what a worker is at, else in the next."""
        self._jobs[job.job_id] = job
        key = job.sort_key
        key_range = self._ranges.find(key)
        if self._may_join(job, key_range):
            self._joinable_work -= _work(job)
            key_range.count += 1
            self._current.add(key)
        else:
            self._next_work += _work(job)
            self._next.add(key)

    def remove(self, job_id: str) -> WaitingJob:
        """Take a job out; raises ``KeyError``."""
        job = self._jobs.pop(job_id)
        key = job.sort_key
        if key in self._current:
            self._current.remove(key)
            self._ranges.find(key).count -= 1
        else:
            self._next.remove(key)
            self._next_work -= _work(job)
        return job

    def peek(self, worker_id: str) -> WaitingJob | None:
        """Return the next job in the worker's own range."""
        self._begin_epoch()
        key_range = self._ranges.owned_by(worker_id)
        if key_range is None or key_range.count == 0:
            return None
        return self._job_at(self._current.bisect_left(key_range.low))

    def claim_range(self, worker_id: str, yields: Callable[[str], bool]) -> bool:
        """Find a new range for a worker whose own is empty; false if there is none for it.

        It is one without owner, else half of another worker's.  A cut through a group of jobs that
        share a prefix makes both workers compute it, so it needs ``yields(owner)``.
        """
        self._begin_epoch()
        candidates = sorted(
            (r for r in self._ranges if r.count and r.owner != worker_id),
            key=lambda r: (r.owner is not None, -r.count),
        )
        return any(self._take_from(r, worker_id, yields) for r in candidates)

    def release(self, worker_id: str) -> None:
        """Forget a worker; its range is anyone's."""
        self._ranges.release(worker_id)

    def _may_join(self, job: WaitingJob, key_range: KeyRange) -> bool:
        if not self._current or key_range.owner is None or _work(job) > self._joinable_work:
            return False
        anchor = self._anchors.get(key_range.owner)
        return anchor is not None and in_one_group(anchor, job.key)

    def _begin_epoch(self) -> None:
        if self._current or not self._next:
            return
        self.epoch += 1
        self._current, self._next = self._next, SortedList()
        self._joinable_work, self._next_work = self._next_work * JOIN_SHARE, 0
        self._ranges = KeyRanges()
        self._spread_ranges()

    def _spread_ranges(self) -> None:
        # Each worker goes on where it is; what lies below the first of them has no owner yet.
        remaining = len(self._current)
        rest = next(iter(self._ranges))
        rest.count = remaining
        seen: set[SortKey] = set()
        starts = sorted((anchor[:_GROUP_BYTES], worker) for worker, anchor in self._anchors.items())
        for prefix, worker_id in starts:
            low: SortKey = (prefix, -1, -1, "")
            if low in seen:
                continue
            seen.add(low)
            above = remaining - self._current.bisect_left(low)
            rest = rest if low == LOWEST else self._ranges.split(rest, low, above)
            self._ranges.assign(rest, worker_id)

    def _take_from(
        self, key_range: KeyRange, worker_id: str, yields: Callable[[str], bool]
    ) -> bool:
        if key_range.owner is None:
            self._ranges.assign(key_range, worker_id)
            return True
        first = self._current.bisect_left(key_range.low)
        offset, depth = self._best_cut(first, key_range)
        if depth >= GROUP_DEPTH and not yields(key_range.owner):
            return False
        if offset:
            low = self._current[first + offset]
            key_range = self._ranges.split(key_range, low, key_range.count - offset)
        self._ranges.assign(key_range, worker_id)
        return True

    def _best_cut(self, first: int, key_range: KeyRange) -> tuple[int, int]:
        """Return offset and shared depth of the cut: near the middle, through little prefix."""
        if key_range.count == 1:
            anchor = self._anchors.get(key_range.owner or "", b"")
            return 0, shared_depth(anchor, self._current[first][0])
        middle = key_range.count // 2
        reach = min(_CUT_WINDOW, key_range.count // 4)
        window = range(max(1, middle - reach), min(key_range.count, middle + reach + 1))
        keys = [k[0] for k in self._current.islice(first + window[0] - 1, first + window[-1] + 1)]
        depths = [shared_depth(left, right) for left, right in pairwise(keys)]
        depth, _, offset = min(
            (depth, abs(offset - middle), offset)
            for depth, offset in zip(depths, window, strict=True)
        )
        return offset, depth

    def _job_at(self, index: int) -> WaitingJob:
        return self._jobs[self._current[index][3]]


def _work(job: WaitingJob) -> int:
    return max(1, job.cost)
