"""The order in which bulk jobs are dispatched: depth-first over their shared prefixes.

Workers walk the prefix order as an elevator does, in epochs (N-step SCAN): what waits when an
epoch begins is served to its end while newcomers gather for the next one.  Each worker walks a
range of its own, and takes half of another's when its own is done.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter

from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.key_ranges import KeyRange, KeyRanges
from tidemill_scheduler.policy.prefix_cuts import Cut, Load, PrefixCuts
from tidemill_scheduler.policy.prefix_list import PrefixList
from tidemill_scheduler.policy.routing_hashes import group_depth, shared_depth

#: Work that may join a running epoch, as a share of the work it began with.
JOIN_SHARE = 0.25

#: Who submits many jobs needs some seconds for it: what comes so soon after the last job that an
#: epoch began with still belongs to it.
EARLY_SECONDS = 5.0

#: Tokens of work that are not worth being shared out when an epoch begins; whoever finds nothing
#: else may still take half of it.
LEAST_PART = 16384

#: How far a cut may lie from the even one: at an epoch's begin as a share of one worker's part,
#: when a range is halved as a share of its work.
EPOCH_TOLERANCE = 0.02
STEAL_TOLERANCE = 0.25

#: What a job's output is worth in tokens of work, where an idle worker weighs whether to compute a
#: prefix that another one has.
OUTPUT_WORK = 256

#: Ranges, those with the most work, that are tried before a worker is told there is none for it.
MAX_VICTIMS = 8

#: ``followers`` counts up to here.
MAX_FOLLOWERS = 1000


#: Whether jobs stay in a range that share so many hashes with what its worker is at.
_Keeps = Callable[[KeyRange, int, Load], bool]


class PrefixOrder:
    """Jobs of one model and one priority, for the workers whose ids ``workers`` has at the time.

    Bound on waiting: a job that arrives in epoch e is dispatched before epoch e + 1 ends, so at
    most ``1.25 x (W_e + W_e+1)`` tokens of work go before it, W being the work that waited when an
    epoch began or joined it within ``early_seconds``.  What joins epoch e + 1 later, at most a
    quarter of W_e+1, may overtake it; nothing that arrives after that can.  Work is what is left of
    a job's prompt behind its predecessor in the order (see ``PrefixList``); that a prefix is
    computed once more on each side of a cut is not counted.

    An order that is told who ``is_stuck`` is thrifty: it cuts no group for less work than its
    prefix is, even if its worker yields, unless that is stuck.
    """

    def __init__(
        self,
        workers: Collection[str],
        tokens_per_hash: int,
        *,
        is_stuck: Callable[[str], bool] | None = None,
        early_seconds: float = EARLY_SECONDS,
    ) -> None:
        self._is_thrifty = is_stuck is not None
        self._is_stuck = is_stuck or _nobody
        self._workers = workers
        self._tokens_per_hash = tokens_per_hash
        self._group_depth = group_depth(tokens_per_hash)
        self._group_bytes = self._group_depth * ROUTING_HASH_BYTES
        self._current = PrefixList(tokens_per_hash)
        self._next = PrefixList(tokens_per_hash)
        self._ranges = KeyRanges(Load(0, 0))
        self._anchors: dict[str, bytes] = {}
        self._early_seconds = early_seconds
        self._joinable_work = 0.0
        # When the newest job came, of all and of those that the epoch began with.
        self._newest = self._began_at = -math.inf
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

    def add(self, job: WaitingJob) -> str | None:
        """Let a job wait: in this epoch if it is early or extends what a worker is at, or the next.

        Returns the worker whose range it joined, if there is one.  Raises ``ValueError`` if the job
        waits already.
        """
        if job.job_id in self:
            raise ValueError(f"job {job.job_id} waits already; remove it before adding it again")
        self._newest = max(self._newest, job.since)
        key_range = self._join(job) if self._current else None
        if key_range is None:
            self._next.add(job)
            return None
        return key_range.owner

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
        key_range = self._ranges.held_by(worker_id)
        if key_range and key_range.owner and key_range.count and self._head_of(key_range) is job:
            before = self._current.work
            follower = self._current.serve(job)
            self._count_out(key_range, before)
            key_range.head = follower if key_range.count else None
        else:
            self.remove(job.job_id)
        self._anchors[worker_id] = job.key

    def peek(self, worker_id: str) -> WaitingJob | None:
        """Return the next job in the worker's own range."""
        key_range = self._ranges.held_by(worker_id)
        # In every decision, and nearly always all is known.
        if key_range and key_range.owner and key_range.head:
            return key_range.head
        if not self._current:
            self._begin_epoch(worker_id)
        key_range = self._own_range(worker_id)
        if key_range is None or not key_range.count:
            return None
        return key_range.head or self._head_of(key_range)

    def claim_range(
        self, worker_id: str, yields: Callable[[str], bool], *, at_any_cost: bool = False
    ) -> bool:
        """Find a new range for a worker whose own is empty; false if there is none for it.

        It is one without owner, else half of that with the most work.  A cut through a group of
        jobs that share a prefix makes both workers compute it, so it needs ``yields(owner)``, or
        is wanted ``at_any_cost``.
        """
        if self.peek(worker_id) is not None:
            return True
        others = [
            r
            for r in self._ranges
            if r.count and (not r.is_whole or at_any_cost or not self._is_kept(r))
        ]
        if free := [r for r in others if r.owner is None and not r.team]:
            self._ranges.assign(max(free, key=attrgetter("work")), worker_id)
            return True
        keeps = _never if at_any_cost else partial(self._keeps, yields=yields)
        shares = [r.work / (len(r.team) or 1) for r in others]
        for _ in range(min(MAX_VICTIMS, len(others))):
            # Mostly the first one gives, so that sorting them all would be in vain.
            place = shares.index(max(shares))
            if self._take_from(others[place], worker_id, keeps):
                return True
            shares[place] = -math.inf
        return False

    def release(self, worker_id: str) -> None:
        """Forget a worker; its range is anyone's."""
        self._ranges.release(worker_id)
        self._anchors.pop(worker_id, None)

    def followers(self, worker_id: str, depth: int) -> int:
        """Return how many jobs share the first ``depth`` hashes of the worker's next job.

        Only jobs of its own range count, the next one included, and ``MAX_FOLLOWERS`` at most.
        """
        job = self.peek(worker_id)
        key_range = self._ranges.held_by(worker_id)
        if job is None or key_range is None:
            return 0
        limit = min(key_range.count, MAX_FOLLOWERS)
        prefix = job.key[: depth * ROUTING_HASH_BYTES]
        return self._current.count_prefix(self._current.place_of(job), prefix, limit)

    def _join(self, job: WaitingJob) -> KeyRange | None:
        """Let a job wait in the running epoch, if it may; returns in which range."""
        key_range = self._ranges.find(job)
        extends, is_early = self._extends(key_range, job), self._is_early(key_range, job)
        if not (extends or is_early):
            return None
        place = self._current.place_of(job)
        depth = self._current.depth_at(place, job.key)
        if extends:
            # The worker has what it was at last, even if the job sorts before that.
            depth = max(depth, shared_depth(self._anchor_of(key_range.owner or ""), job.key))
        work = self._current.work_of(job, depth)
        if not is_early:
            if work > self._joinable_work:
                return None
            self._joinable_work -= work
        before = self._current.work
        self._current.insert(place, job, depth)
        key_range.is_whole = False
        key_range.count += 1
        key_range.work += self._current.work - before
        key_range.head = None
        return key_range

    def _extends(self, key_range: KeyRange, job: WaitingJob) -> bool:
        """Whether a job belongs to the group that a worker is at, or comes to next."""
        if key_range.owner is None or len(job.key) < self._group_bytes:
            return False
        if self._in_group(self._anchor_of(key_range.owner), job.key):
            return True
        return key_range.count > 0 and self._in_group(self._head_of(key_range).key, job.key)

    def _is_early(self, key_range: KeyRange, job: WaitingJob) -> bool:
        """Whether a job came soon enough, and its place was not walked over yet."""
        if job.since - self._began_at >= self._early_seconds:
            return False
        if key_range.owner is None:
            return True
        return key_range.count > 0 and self._head_of(key_range).key <= job.key

    def _begin_epoch(self, worker_id: str) -> None:
        if not self._next:
            return
        self.epoch += 1
        self._current, self._next = self._next, PrefixList(self._tokens_per_hash)
        self._joinable_work = self._current.work * JOIN_SHARE
        self._began_at = self._newest
        # Those that have been nowhere come first, and are left out if there is too little for all,
        # but not the one that asks.
        num_parts = min(len(self._current), self._current.work // LEAST_PART)
        others = [worker for worker in self._workers if worker != worker_id]
        others.sort(key=self._anchor_of)
        team = others[max(0, len(others) - num_parts + 1) :]
        insort(team, worker_id, key=self._anchor_of)
        whole = Load(len(self._current), self._current.work)
        self._ranges = KeyRanges(whole, team)

    def _own_range(self, worker_id: str) -> KeyRange | None:
        """The worker's range, cut off that of its team if it has none of its own yet."""
        key_range = self._ranges.held_by(worker_id)
        if key_range is None or key_range.owner is not None:
            return key_range
        # The last jobs may have gone before all workers came.
        for other in [w for w in key_range.team if w != worker_id][max(0, key_range.count - 1) :]:
            self._ranges.release(other)
        while len(key_range.team) > 1:
            self._divide(key_range)
            key_range = self._ranges.held_by(worker_id) or key_range
        self._ranges.assign(key_range, worker_id)
        return self._from_group(key_range, worker_id)

    def _divide(self, key_range: KeyRange) -> None:
        """Cut a team's range in two, so that its workers get parts of equal work in the end.

        Each goes to the side where it is, if that has room.
        """
        team = key_range.team
        num_below = len(team) // 2
        cuts = self._cuts_of(key_range)
        part = cuts.load.work / len(team)
        cut = cuts.best(
            part * num_below,
            part * EPOCH_TOLERANCE,
            num_below=num_below,
            num_above=len(team) - num_below,
        )
        # Of too many on one side those that are farthest from the cut go over.
        num_there = bisect_left(team, cut.job.key, key=self._anchor_of)
        surplus = num_there - num_below
        if surplus > 0:
            above = team[:surplus] + team[num_there:]
        else:
            above = team[num_there : len(team) + surplus]
        self._ranges.split(key_range, cut, above)

    def _from_group(self, key_range: KeyRange, worker_id: str) -> KeyRange:
        """Cut off what sorts before the group a worker is in, if more of that waits."""
        anchor = self._anchor_of(worker_id)
        place = self._current.place_of_prefix(anchor[: self._group_bytes])
        first = self._current.job_at(place)
        if first is None or not self._in_group(anchor, first.key):
            return key_range
        cut = self._cuts_of(key_range).at(place)
        if cut is not None:
            key_range = self._ranges.split(key_range, cut)
            self._ranges.assign(key_range, worker_id)
        return key_range

    def _take_from(self, key_range: KeyRange, worker_id: str, keeps: _Keeps) -> bool:
        if key_range.team:
            key_range = self._own_range(key_range.team[0]) or key_range
        owner = key_range.owner or ""
        if key_range.count == 1:
            job = self._head_of(key_range)
            depth = shared_depth(self._anchor_of(owner), job.key)
            load = Load(1, self._current.work_of(job, depth))
            if keeps(key_range, depth, load):
                return False
            self._ranges.assign(key_range, worker_id)
            return True
        cuts = self._cuts_of(key_range)
        cut = self._half(cuts)
        if keeps(key_range, cut.depth, cut.above):
            return False
        key_range.work = cuts.load.work
        self._ranges.assign(self._ranges.split(key_range, cut), worker_id)
        return True

    def _keeps(
        self, key_range: KeyRange, depth: int, load: Load, yields: Callable[[str], bool]
    ) -> bool:
        """Whether jobs stay in a range that share so many hashes with what its worker is at."""
        if depth < self._group_depth:
            return False
        # Who would take them over computes the prefix once more.
        is_waste = depth * self._tokens_per_hash > load.work + OUTPUT_WORK * load.size
        key_range.is_whole = self._is_thrifty and is_waste
        return self._is_kept(key_range) or not yields(key_range.owner or "")

    def _is_kept(self, key_range: KeyRange) -> bool:
        return key_range.is_whole and not self._is_stuck(key_range.owner or "")

    def _half(self, cuts: PrefixCuts) -> Cut:
        work = cuts.load.work
        cut = cuts.best(work / 2, STEAL_TOLERANCE * work)
        if cut.depth < self._group_depth:
            return cut
        # An uneven half is better than a group in two places.
        wider = cuts.best(work / 2, work)
        return wider if wider.depth < self._group_depth else cut

    def _cuts_of(self, key_range: KeyRange) -> PrefixCuts:
        low, after = key_range.low, self._ranges.after(key_range)
        start = self._current.place_of(low) if low else (0, 0)
        chunks = self._current.chunks
        end = self._current.place_of(after.low) if after and after.low else (len(chunks), 0)
        return PrefixCuts(chunks, start, end)

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

    def _anchor_of(self, worker_id: str) -> bytes:
        return self._anchors.get(worker_id, b"")

    def _in_group(self, left: bytes, right: bytes) -> bool:
        size = self._group_bytes
        return len(left) >= size and left[:size] == right[:size]


def _nobody(worker_id: str) -> bool:
    return False


def _never(key_range: KeyRange, depth: int, load: Load) -> bool:
    return False
