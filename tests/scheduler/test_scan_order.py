"""The order of bulk jobs, checked against a trie and against its promises."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.scan_orders import (
    TOKENS,
    WORKERS,
    add_all,
    group_of,
    new_order,
    num_runs,
    pop,
    pop_all,
)
from support.waiting_jobs import key_of, make_job
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy import prefix_list
from tidemill_scheduler.policy.prefix_order import PrefixOrder

paths = st.lists(st.integers(0, 2), max_size=5).map(tuple)
many_paths = st.lists(paths, max_size=60)
turns_of_workers = st.lists(st.sampled_from(WORKERS), min_size=1, max_size=20)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that a few jobs fill, so that ranges span several."""
    monkeypatch.setattr(prefix_list, "CHUNK_SIZE", 4)
    monkeypatch.setattr(prefix_list, "_SMALL_CHUNK", 2)


@dataclass
class TrieNode:
    """A node of a radix tree that stores its jobs in order of arrival."""

    jobs: list[str] = field(default_factory=list)
    children: dict[bytes, "TrieNode"] = field(default_factory=dict)

    def insert(self, key: bytes, job_id: str) -> None:
        node = self
        for start in range(0, len(key), ROUTING_HASH_BYTES):
            label = key[start : start + ROUTING_HASH_BYTES]
            node = node.children.setdefault(label, TrieNode())
        node.jobs.append(job_id)

    def walk(self) -> list[str]:
        below = [job for label in sorted(self.children) for job in self.children[label].walk()]
        return self.jobs + below


class OrderAndModel(RuleBasedStateMachine):
    """Random work of three workers that come and go; what waits is known from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, None] = {}
        self.order = PrefixOrder(self.workers, TOKENS)
        self.waiting: dict[str, WaitingJob] = {}

    @rule(all_paths=st.lists(st.tuples(paths, st.integers(0, 400)), max_size=20))
    def add(self, all_paths: list[tuple[tuple[int, ...], int]]) -> None:
        for path, cost in all_paths:
            job = make_job(path, cost=cost)
            self.order.add(job)
            self.waiting[job.job_id] = job

    @rule(worker=st.sampled_from(WORKERS))
    def come(self, worker: str) -> None:
        self.workers[worker] = None

    @rule(worker=st.sampled_from(WORKERS))
    def vanish(self, worker: str) -> None:
        self.workers.pop(worker, None)
        self.order.release(worker)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), yields=st.booleans())
    def serve(self, data: st.DataObject, yields: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        waits = bool(self.waiting)
        job = pop(self.order, worker, yields=yields)
        if job is not None:
            assert self.waiting.pop(job.job_id) is job
        elif yields:
            assert not waits

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def take_any(self, data: st.DataObject, worker: str) -> None:
        job = data.draw(st.sampled_from(list(self.waiting.values())))
        self.order.take(job, worker)
        del self.waiting[job.job_id]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(list(self.waiting.values())))
        assert self.order.remove(job.job_id) is job
        del self.waiting[job.job_id]

    @invariant()
    def counts_what_waits(self) -> None:
        assert len(self.order) == len(self.waiting)
        assert all(job_id in self.order for job_id in self.waiting)
        assert (self.order.work > 0) == bool(self.waiting)
        assert self.order.work <= sum(most_work(job) for job in self.waiting.values())

    @invariant()
    def no_two_workers_are_at_the_same_job(self) -> None:
        nexts = [job.job_id for w in WORKERS if (job := self.order.peek(w))]
        assert len(nexts) == len(set(nexts))
        assert all(job_id in self.waiting for job_id in nexts)

    def teardown(self) -> None:
        served = {job.job_id for job in pop_all(self.order, "a")}
        assert served == set(self.waiting)
        assert len(self.order) == self.order.work == 0


TestOrderAndModel = OrderAndModel.TestCase
TestOrderAndModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def most_work(job: WaitingJob) -> int:
    return max(1, job.cost, TOKENS * len(job.key) // ROUTING_HASH_BYTES)


@given(many_paths)
def test_one_worker_walks_the_radix_tree_depth_first(all_paths: list[tuple[int, ...]]) -> None:
    order = new_order("a")
    trie = TrieNode()
    for job in add_all(order, all_paths):
        trie.insert(job.key, job.job_id)

    walked = [job.job_id for job in pop_all(order, "a")]

    assert walked == trie.walk()
    assert len(order) == 0


@given(many_paths, turns_of_workers)
def test_workers_together_get_every_job_once(
    all_paths: list[tuple[int, ...]], turns: list[str]
) -> None:
    order = new_order(*WORKERS)
    jobs = add_all(order, all_paths)

    got = [job.job_id for turn in range(len(jobs)) if (job := pop(order, turns[turn % len(turns)]))]

    assert sorted(got) == sorted(job.job_id for job in jobs)


@given(many_paths, turns_of_workers, st.sampled_from((("a",), WORKERS)))
def test_a_group_whose_owner_does_not_yield_is_cut_only_when_an_epoch_begins(
    all_paths: list[tuple[int, ...]], turns: list[str], workers: tuple[str, ...]
) -> None:
    order = new_order(*workers)
    jobs = add_all(order, all_paths)
    served: dict[str, list[WaitingJob]] = {worker: [] for worker in WORKERS}

    # A worker that finds nothing steps aside; the one that has the group goes on.
    turn = 0
    while len(order):
        worker = (*turns, *WORKERS)[turn % (len(turns) + len(WORKERS))]
        if job := pop(order, worker, yields=False):
            served[worker].append(job)
        turn += 1

    # Three parts of equal work may have two cuts through groups.
    num_pieces = sum(num_runs(jobs) for jobs in served.values())
    assert num_pieces <= len({group_of(job) for job in jobs}) + len(workers) - 1


@given(many_paths, turns_of_workers)
def test_each_stolen_range_costs_at_most_one_more_run_of_a_group(
    all_paths: list[tuple[int, ...]], turns: list[str]
) -> None:
    order = new_order("a")
    add_all(order, all_paths)
    served: dict[str, list[WaitingJob]] = {worker: [] for worker in WORKERS}
    num_claims = 0

    for turn in range(len(order)):
        worker = turns[turn % len(turns)]
        num_claims += order.peek(worker) is None
        job = pop(order, worker)
        assert job is not None
        served[worker].append(job)

    groups = {group_of(job) for jobs in served.values() for job in jobs}
    assert sum(num_runs(jobs) for jobs in served.values()) <= len(groups) + num_claims


@dataclass
class Arrival:
    """What the order looked like when a job arrived."""

    epoch: int
    work_before: int


@dataclass
class Witness:
    """Follows the work that goes out of an order, and what its epochs began with.

    Time is what it is told.  What came early in an epoch counts as waiting when that began.
    """

    order: PrefixOrder
    early_seconds: float
    now: float = 0.0
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    work_of: dict[int, int] = field(default_factory=lambda: {0: 0})
    began_at: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    newest: float = 0.0
    done: int = 0

    def arrive(self, job: WaitingJob) -> None:
        epoch, before = self.order.epoch, self.order.work
        self.arrivals[job.job_id] = Arrival(epoch, self.done)
        self.order.add(replace(job, since=self.now))
        self.newest = self.now
        if epoch and self.now - self.began_at[epoch] < self.early_seconds:
            self.work_of[epoch] += max(0, self.order.work - before)

    def peek(self, worker: str) -> WaitingJob | None:
        before = self.order.work
        job = self.order.peek(worker)
        self._note_epoch(before)
        return job

    def serve(self, worker: str) -> None:
        before = self.order.work
        job = pop(self.order, worker)
        if job is not None:
            self._check(job, before)

    def serve_other(self, worker: str, job: WaitingJob) -> None:
        before = self.order.work
        self.order.take(job, worker)
        self._check(job, before)

    def _note_epoch(self, work: int) -> None:
        # Where the epoch began with this very call, all that waited was its work.
        if self.order.epoch not in self.work_of:
            self.work_of[self.order.epoch] = work
            self.began_at[self.order.epoch] = self.newest

    def _check(self, job: WaitingJob, before: int) -> None:
        self._note_epoch(before)
        arrival = self.arrivals.pop(job.job_id)
        assert self.order.epoch <= arrival.epoch + 1
        later = self.work_of.get(arrival.epoch + 1, 0)
        bound = 1.25 * (self.work_of[arrival.epoch] + later)
        self.done += before - self.order.work
        assert self.done - arrival.work_before <= bound


steps = st.lists(
    st.tuples(
        st.sampled_from(WORKERS),
        st.booleans(),
        st.lists(st.tuples(st.booleans(), paths, st.integers(1, 400)), max_size=4),
    ),
    max_size=40,
)


@pytest.mark.parametrize("early_seconds", [0.0, 3.0])
@settings(max_examples=200, deadline=None)
@given(all_paths=many_paths, script=steps)
def test_nobody_waits_longer_than_two_epochs_whatever_arrives(
    early_seconds: float,
    all_paths: list[tuple[int, ...]],
    script: list[tuple[str, bool, list[tuple[bool, tuple[int, ...], int]]]],
) -> None:
    order = new_order(*WORKERS, early_seconds=early_seconds)
    witness = Witness(order, early_seconds)

    for path in all_paths:
        witness.arrive(make_job(path, cost=len(path) * TOKENS))
    at: dict[str, bytes] = {}
    for worker, takes_others, newcomers in script:
        witness.now += 1.0
        if job := witness.peek(worker):
            at[worker] = job.key
        if takes_others and job:
            # As a worker does that has the job's prefix, and is not in this range.
            witness.serve_other(WORKERS[WORKERS.index(worker) - 1], job)
        else:
            witness.serve(worker)
        for pushes_in, path, cost in newcomers:
            # The adversary extends what the worker is at, which may join the running epoch.
            job = make_job(path, cost=cost)
            witness.arrive(replace(job, key=at.get(worker, b"") + job.key) if pushes_in else job)
    while len(order):
        witness.serve("a")

    assert not witness.arrivals


def test_what_comes_soon_after_an_epoch_began_belongs_to_it_where_it_was_not_walked_over() -> None:
    order = new_order("a", early_seconds=5.0)
    groups = sorted([(1, 1), (2, 2), (3, 3)], key=key_of)
    add_all(order, [(*group, label) for group in groups for label in (1, 2)])
    for _ in range(3):
        pop(order, "a")
    # The worker is in the second group, and the newest job of the epoch came at 0 s.
    behind = replace(make_job((*groups[0], 7)), since=1.0)
    ahead = replace(make_job((*groups[2], 7)), since=4.9)
    late = replace(make_job((*groups[2], 8)), since=5.0)

    for job in (behind, ahead, late):
        order.add(job)

    served = [job.job_id for job in pop_all(order, "a")]
    assert ahead.job_id in served[:4]
    assert {behind.job_id, late.job_id} == set(served[4:])


def test_early_jobs_join_ranges_that_nobody_has_begun() -> None:
    order = new_order("a", "b", early_seconds=5.0)
    add_all(order, [(label, label, part) for label in range(20) for part in range(9)], cost=2000)
    assert order.peek("a") is not None

    early = [replace(make_job((label, label, 9)), since=1.0) for label in range(20)]
    for job in early:
        order.add(job)

    while order.epoch == 1 and (pop(order, "b") or pop(order, "a")):
        pass
    # Nobody had served anything, so none of them was behind a worker.
    assert len(order) == 0


@given(many_paths)
def test_work_is_what_one_worker_with_a_large_cache_computes(
    all_paths: list[tuple[int, ...]],
) -> None:
    order = new_order("a")
    add_all(order, all_paths)
    nodes = {path[:end] for path in all_paths for end in range(1, len(path) + 1)}
    # Something is left of every job: the last token of a repeated prompt is computed anew.
    num_repeated = len(all_paths) - len(set(all_paths) - {()})

    assert order.work == TOKENS * len(nodes) + num_repeated


def test_a_job_that_extends_the_current_group_joins_the_epoch() -> None:
    order = new_order("a")
    add_all(order, [(1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)])
    first = pop(order, "a")
    assert first is not None
    group = next(path for path in ((1, 1), (2, 2)) if key_of(path) == first.key[:16])

    joins, waits = make_job((*group, 7), cost=50), make_job((9, 9, 9), cost=50)
    order.add(joins)
    order.add(waits)

    served = [job.job_id for job in pop_all(order, "a")]
    assert joins.job_id in served[:2]
    assert served[-1] == waits.job_id


def test_a_job_joins_the_group_that_its_worker_comes_to_next() -> None:
    order = new_order("a")
    groups = sorted([(1, 1), (2, 2), (3, 3)], key=key_of)
    add_all(order, [(*group, label) for group in groups for label in (1, 2)])
    # Nothing was served yet; only the first group is next.
    assert order.peek("a") is not None
    near, far = make_job((*groups[0], 7)), make_job((*groups[1], 7))

    order.add(near)
    order.add(far)

    served = [job.job_id for job in pop_all(order, "a")]
    assert near.job_id in served[:3]
    assert served[-1] == far.job_id


def test_joiners_take_a_quarter_of_the_epochs_work_at_most() -> None:
    order = new_order("a")
    # The first computes its two blocks and all of them 100 tokens of their own.
    add_all(order, [(1, 1)] * 8, cost=2 * TOKENS + 100)
    assert order.work == 2 * TOKENS + 8 * 100
    pop(order, "a")

    add_all(order, [(1, 1)] * 20, cost=2 * TOKENS + 100)

    served = 0
    while order.epoch == 1 and pop(order, "a"):
        served += order.epoch == 1
    assert served == 7 + 2


def test_a_removed_job_is_not_served() -> None:
    order = new_order("a")
    current = add_all(order, [(1,)] * 3)
    pop(order, "a")
    upcoming = add_all(order, [(2,)] * 3)

    order.remove(current[1].job_id)
    order.remove(upcoming[1].job_id)

    rest = [job.job_id for job in pop_all(order, "a")]
    assert rest == [current[2].job_id, upcoming[0].job_id, upcoming[2].job_id]


def test_a_job_that_waits_already_is_refused() -> None:
    order = new_order("a")
    served, waits = add_all(order, [(1,), (1,)])
    pop(order, "a")

    with pytest.raises(ValueError, match=waits.job_id):
        order.add(waits)

    order.add(served)
    assert pop_all(order, "a") == [waits, served]


def test_a_job_that_does_not_wait_cannot_be_taken() -> None:
    order = new_order("a")
    job = make_job((1,))

    with pytest.raises(KeyError):
        order.take(job, "a")
    with pytest.raises(KeyError):
        order.remove(job.job_id)


def test_the_range_of_a_released_worker_is_taken_over_whole() -> None:
    order = new_order("a", "b")
    add_all(order, [(1, 1, 1)] * 6)
    pop(order, "a")
    pop(order, "b")

    order.release("a")

    served = [pop(order, "b", yields=False) for _ in range(4)]
    assert None not in served


def test_a_new_epoch_begins_for_each_worker_where_it_is() -> None:
    order = new_order("a", "b")
    add_all(order, [(label, label) for label in range(6)])
    at: dict[str, bytes] = {}
    for _ in range(3):
        for worker in ("a", "b"):
            job = pop(order, worker)
            assert job is not None
            at[worker] = job.key
    followers = {
        worker: WaitingJob("f" + worker, "p1:d", "9-9", "m", at[worker], 10)
        for worker in ("a", "b")
    }

    for follower in followers.values():
        order.add(follower)

    for worker, follower in followers.items():
        assert pop(order, worker, yields=False) == follower


def test_a_worker_goes_on_in_its_group_and_then_comes_to_what_sorts_before_it() -> None:
    order = new_order("a")
    groups = sorted([(label, label) for label in range(5)], key=key_of)
    add_all(order, [groups[2]])
    pop(order, "a")
    add_all(order, groups)

    served = [job.key for job in pop_all(order, "a")]

    assert served == [key_of(group) for group in groups[2:] + groups[:2]]
