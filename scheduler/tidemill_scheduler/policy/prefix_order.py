"""The order in which bulk jobs are dispatched: depth-first over their shared prefixes.

Workers walk the prefix order as an elevator does, in epochs (N-step SCAN): what waits when an
epoch begins is served to its end while newcomers gather for the next one.  Each worker walks a
range of its own, and takes half of another's when its own is done.
"""

from collections.abc import Callable, Collection
from heapq import nlargest
from operator import attrgetter

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.jobs import WaitingJob
from tidemill_scheduler.policy.key_ranges import KeyRange, KeyRanges
from tidemill_scheduler.policy.prefix_cuts import Cut, Mark, PrefixCuts
from tidemill_scheduler.policy.prefix_list import PrefixList, shared_depth

#: Tokens from which a shared prefix makes a group that is kept on one worker.
GROUP_TOKENS = 128

#: Work that may join a running epoch, as a share of the work it began with.
JOIN_SHARE = 0.25

#: How far a cut may lie from the even one: at an epoch's begin as a share of one worker's part,
#: when a range is halved as a share of its work.
EPOCH_TOLERANCE = 0.02
STEAL_TOLERANCE = 0.25

#: Ranges, those with the most work, that are tried before a worker is told there is none for it.
MAX_VICTIMS = 64

#: ``followers`` counts up to here.
MAX_FOLLOWERS = 1000


def group_depth(tokens_per_hash: int) -> int:
    """Return how many routing hashes two jobs of one group share at least."""
    return max(1, -(-GROUP_TOKENS // tokens_per_hash))


class PrefixOrder:
    """Jobs of one model and one priority, for the workers whose ids ``workers`` has at the time.

    Bound on waiting: a job that arrives in epoch e is dispatched before epoch e + 1 ends, so at
    most ``1.25 x (W_e + W_e+1)`` tokens of work go before it, W being the work that waited when an
    epoch began.  What joins epoch e + 1, at most a quarter of W_e+1, may overtake it; nothing that
    arrives later can.  Work is what is left of a job's prompt behind its predecessor in the order
    (see ``PrefixList``); that a prefix is computed once more on each side of a cut is not counted.
    """

    def __init__(self, workers: Collection[str], tokens_per_hash: int) -> None:
        self._workers = workers
        self._tokens_per_hash = tokens_per_hash
        self._group_depth = group_depth(tokens_per_hash)
        self._group_bytes = self._group_depth * ROUTING_HASH_BYTES
        self._current = PrefixList(tokens_per_hash)
        self._next = PrefixList(tokens_per_hash)
        self._ranges = KeyRanges()
        self._anchors: dict[str, bytes] = {}
        self._joinable_work = 0.0
        #: How many epochs began.
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._current) + len(self._next)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._current or job_id in self._next

    @property
    def work(self) -> int:
        """The tokens of prompts that wait to be computed, each shared prefix counted once."""
        return self._current.work + self._next.work

    def add(self, job: WaitingJob) -> None:
        """Let a job wait: in this epoch if it extends what a worker is at, else in the next.

        Raises ``ValueError`` if it waits already.
        """
        if job.job_id in self:
            raise ValueError(f"job {job.job_id} waits already; remove it before adding it again")
        if not self._current or not self._join(job):
            self._next.add(job)

    def remove(self, job_id: str) -> WaitingJob:
        """Take out a job that nobody computes; raises ``KeyError``."""
        if job_id not in self._current:
            return self._next.remove(job_id)
        before = self._current.work
        job = self._current.remove(job_id)
        key_range = self._ranges.find(job)
        self._count_out(key_range, before)
        if key_range.head is job:
            key_range.head = None
        return job

    def take(self, job: WaitingJob, worker_id: str) -> None:
        """Take out a job for a worker, which is at this place of the order from now on.

        It may be any that waits, in whosever range it is.  Raises ``KeyError``.
        """
        key_range = self._ranges.owned_by(worker_id)
        if key_range is not None and key_range.count and self._head_of(key_range) is job:
            before = self._current.work
            follower = self._current.serve(job)
            self._count_out(key_range, before)
            key_range.head = follower if key_range.count else None
        else:
            self.remove(job.job_id)
        self._anchors[worker_id] = job.key

    def peek(self, worker_id: str) -> WaitingJob | None:
        """Return the next job in the worker's own range."""
        self._begin_epoch()
        key_range = self._ranges.owned_by(worker_id)
        if key_range is None or not key_range.count:
            return None
        return self._head_of(key_range)

    def claim_range(self, worker_id: str, yields: Callable[[str], bool]) -> bool:
        """Find a new range for a worker whose own is empty; false if there is none for it.

        It is one without owner, else half of that with the most work.  A cut through a group of
        jobs that share a prefix makes both workers compute it, so it needs ``yields(owner)``.
        """
        self._begin_epoch()
        others = [r for r in self._ranges if r.count and r.owner != worker_id]
        if free := [r for r in others if r.owner is None]:
            self._ranges.assign(max(free, key=attrgetter("work")), worker_id)
            return True
        victims = nlargest(MAX_VICTIMS, others, key=attrgetter("work"))
        return any(self._take_from(victim, worker_id, yields) for victim in victims)

    def release(self, worker_id: str) -> None:
        """Forget a worker; its range is anyone's."""
        self._ranges.release(worker_id)
        self._anchors.pop(worker_id, None)

    def followers(self, worker_id: str, depth: int) -> int:
        """Return how many jobs share the first ``depth`` hashes of the worker's next job.

        Only jobs of its own range count, the next one included, and ``MAX_FOLLOWERS`` at most.
        """
        job = self.peek(worker_id)
        key_range = self._ranges.owned_by(worker_id)
        if job is None or key_range is None:
            return 0
        limit = min(key_range.count, MAX_FOLLOWERS)
        prefix = job.key[: depth * ROUTING_HASH_BYTES]
        return self._current.count_prefix(self._current.place_of(job), prefix, limit)

    def _join(self, job: WaitingJob) -> bool:
        key_range = self._ranges.find(job)
        if key_range.owner is None or len(job.key) < self._group_bytes:
            return False
        anchor = self._anchors.get(key_range.owner, b"")
        head = self._head_of(key_range) if key_range.count else None
        if not self._in_group(anchor, job.key) and not (head and self._in_group(head.key, job.key)):
            return False
        place = self._current.place_of(job)
        # The worker has what it was at last, even if the job sorts before that.
        depth = max(self._current.depth_at(place, job.key), shared_depth(anchor, job.key))
        work = self._current.work_of(job, depth)
        if work > self._joinable_work:
            return False
        self._joinable_work -= work
        before = self._current.work
        self._current.insert(place, job, depth)
        key_range.count += 1
        key_range.work += self._current.work - before
        key_range.head = None
        return True

    def _begin_epoch(self) -> None:
        if self._current or not self._next:
            return
        self.epoch += 1
        self._current, self._next = self._next, PrefixList(self._tokens_per_hash)
        self._joinable_work = self._current.work * JOIN_SHARE
        cuts = PrefixCuts(self._current.chunks)
        num_parts = max(1, min(len(self._workers), len(self._current)))
        whole = Mark(len(self._current), self._current.work)
        self._ranges = KeyRanges(cuts.even_cuts(num_parts, EPOCH_TOLERANCE), whole)
        self._spread_workers(cuts)

    def _spread_workers(self, cuts: PrefixCuts) -> None:
        """Let each worker go on where it is; those without a place get what is left, in order."""
        anchors = ((self._anchors.get(worker, b""), worker) for worker in self._workers)
        others = []
        for anchor, worker_id in sorted(anchors):
            key_range = self._ranges.find_key(anchor)
            if anchor and key_range.owner is None:
                self._ranges.assign(self._from_group(key_range, anchor, cuts), worker_id)
            else:
                others.append(worker_id)
        free = [r for r in self._ranges if r.owner is None]
        for worker_id, key_range in zip(others, free, strict=False):
            self._ranges.assign(key_range, worker_id)

    def _from_group(self, key_range: KeyRange, anchor: bytes, cuts: PrefixCuts) -> KeyRange:
        """Cut off what sorts before the group a worker is in, if more of that waits."""
        place = self._current.place_of_prefix(anchor[: self._group_bytes])
        first = self._current.job_at(place)
        if first is None or not self._in_group(anchor, first.key):
            return key_range
        start, end = self._bounds(key_range, cuts)
        mark = cuts.mark(place)
        if not start.count < mark.count < end.count:
            return key_range
        return self._ranges.split(key_range, first, _between(mark, end))

    def _take_from(
        self, key_range: KeyRange, worker_id: str, yields: Callable[[str], bool]
    ) -> bool:
        owner = key_range.owner or ""
        if key_range.count == 1:
            depth = shared_depth(self._anchors.get(owner, b""), self._head_of(key_range).key)
            if depth >= self._group_depth and not yields(owner):
                return False
            self._ranges.assign(key_range, worker_id)
            return True
        cuts = PrefixCuts(self._current.chunks)
        start, end = self._bounds(key_range, cuts)
        cut = self._halve(cuts, start, end)
        if cut.depth >= self._group_depth and not yields(owner):
            return False
        key_range.work = end.work - start.work
        upper = self._ranges.split(key_range, cut.job, _between(cut.mark, end))
        self._ranges.assign(upper, worker_id)
        return True

    def _halve(self, cuts: PrefixCuts, start: Mark, end: Mark) -> Cut:
        work = end.work - start.work
        first, last = cuts.place(start.count + 1), cuts.place(end.count - 1)
        middle = start.work + work / 2
        cut = cuts.best_cut(middle, STEAL_TOLERANCE * work, first, last)
        if cut.depth < self._group_depth:
            return cut
        # An uneven half is better than a group in two places.
        wider = cuts.best_cut(middle, work, first, last)
        return wider if wider.depth < self._group_depth else cut

    def _bounds(self, key_range: KeyRange, cuts: PrefixCuts) -> tuple[Mark, Mark]:
        """What stands before the first job of a range, and before the first one behind it."""
        low = key_range.low
        start = cuts.mark(self._current.place_of(low) if low else (0, 0))
        after = self._ranges.after(key_range)
        if after is None or after.low is None:
            return start, Mark(len(self._current), self._current.work)
        return start, cuts.mark(self._current.place_of(after.low))

    def _head_of(self, key_range: KeyRange) -> WaitingJob:
        """The first job of a range that is not empty."""
        if key_range.head is None:
            low = key_range.low
            place = self._current.place_of(low) if low else (0, 0)
            key_range.head = self._current.job_at(place)
        assert key_range.head is not None
        return key_range.head

    def _count_out(self, key_range: KeyRange, work_before: int) -> None:
        key_range.count -= 1
        key_range.work -= work_before - self._current.work

    def _in_group(self, left: bytes, right: bytes) -> bool:
        size = self._group_bytes
        return len(left) >= size and left[:size] == right[:size]


def _between(start: Mark, end: Mark) -> Mark:
    return Mark(end.count - start.count, end.work - start.work)
