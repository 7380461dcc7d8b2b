"""The sorted list of waiting jobs, checked against a plain sorted list of all."""

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.waiting_jobs import key_of, make_job
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy import prefix_list
from tidemill_scheduler.policy.prefix_cuts import PrefixCuts
from tidemill_scheduler.policy.prefix_list import PrefixList
from tidemill_scheduler.policy.routing_hashes import shared_depth

TOKENS = 64
paths = st.lists(st.integers(0, 2), max_size=5).map(tuple)
costs = st.integers(0, 900)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that a few jobs fill, so that they are split and joined all the time."""
    monkeypatch.setattr(prefix_list, "CHUNK_SIZE", 4)
    monkeypatch.setattr(prefix_list, "_SMALL_CHUNK", 2)


def common(left: bytes, right: bytes) -> int:
    """What two keys share, hash by hash."""
    size = ROUTING_HASH_BYTES
    ends = range(size, min(len(left), len(right)) + 1, size)
    same = [left[end - size : end] == right[end - size : end] for end in ends]
    return [*same, False].index(False)


def prefill(job: WaitingJob, depth: int) -> int:
    """The tokens of a job that are left behind so many hashes, from the definition."""
    own = max(job.cost, TOKENS * (len(job.key) // ROUTING_HASH_BYTES - job.hint_depth))
    return max(1, own - TOKENS * max(0, depth - job.hint_depth))


def entries_of(jobs: PrefixList) -> list[tuple[WaitingJob, int, int]]:
    return [
        entry
        for chunk in jobs.chunks
        for entry in zip(chunk.jobs, chunk.depths, chunk.works, strict=True)
    ]


class ListAndModel(RuleBasedStateMachine):
    """Random changes of the list and of a plain list that is sorted and compared anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = PrefixList(TOKENS)
        self.model: list[WaitingJob] = []
        # What jobs that were served share with those that came right behind them.
        self.served: list[WaitingJob] = []

    @initialize(all_paths=st.lists(st.tuples(paths, costs), max_size=60))
    def fill(self, all_paths: list[tuple[tuple[int, ...], int]]) -> None:
        for path, cost in all_paths:
            self.add(path, cost, hinted=False)

    @rule(path=paths, cost=costs, hinted=st.booleans())
    def add(self, path: tuple[int, ...], cost: int, hinted: bool) -> None:
        made = make_job(path, cost=cost)
        hint = int(hinted and bool(path))
        # Hinted keys are apart from the others, as their first hash is of another kind.
        key = key_of((9, *path)) if hint else made.key
        job = WaitingJob(made.job_id, "p1:d", made.entry_id, "m", key, cost, hint_depth=hint)
        self.jobs.add(job)
        self.model = sorted([*self.model, job], key=lambda j: j.sort_key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.model))
        before = self.jobs.work
        assert self.jobs.remove(job.job_id) is job
        assert self.jobs.work <= before
        self.model.remove(job)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.model) - 1))
        job = self.model.pop(index)
        work = {j.job_id: w for j, _, w in entries_of(self.jobs)}[job.job_id]
        before = self.jobs.work
        follower = self.jobs.serve(job)
        assert follower is (self.model[index] if index < len(self.model) else None)
        assert before - self.jobs.work == work
        self.served.append(job)

    @invariant()
    def holds_the_jobs_in_order(self) -> None:
        assert list(self.jobs) == self.model
        assert len(self.jobs) == len(self.model)
        assert all(job.job_id in self.jobs for job in self.model)
        assert all(len(chunk) for chunk in self.jobs.chunks)

    @invariant()
    def knows_what_each_job_shares_with_what_ran_before_it(self) -> None:
        previous = b""
        for job, depth, work in entries_of(self.jobs):
            least = common(previous, job.key)
            assert depth >= least
            if depth > least:
                assert any(common(done.key, job.key) >= depth for done in self.served)
            assert work == prefill(job, depth)
            previous = job.key

    @invariant()
    def sums_are_those_of_the_entries(self) -> None:
        assert self.jobs.work == sum(work for *_, work in entries_of(self.jobs))
        for chunk in self.jobs.chunks:
            assert chunk.work == sum(chunk.works)
            assert list(chunk.sums) == list(accumulate(chunk.works, initial=0))
            assert chunk.least_depth == min(chunk.depths)

    @invariant()
    def finds_each_job_where_it_is(self) -> None:
        for job in self.model:
            assert self.jobs.job_at(self.jobs.place_of(job)) is job


TestListAndModel = ListAndModel.TestCase
TestListAndModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(paths, paths)
def test_shared_depth_counts_the_labels_that_two_paths_share(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    same = [a == b for a, b in zip(left, right, strict=False)]
    expected = [*same, False].index(False)

    assert shared_depth(key_of(left), key_of(right)) == expected


@given(st.lists(st.tuples(paths, costs), min_size=2, max_size=80), st.data())
def test_the_best_cut_is_the_shallowest_near_a_share_of_the_work(
    all_jobs: list[tuple[tuple[int, ...], int]], data: st.DataObject
) -> None:
    _, entries, low, high, cuts = cut_part(all_jobs, data)
    num_below = data.draw(st.integers(1, high - low - 1))
    num_above = data.draw(st.integers(1, high - low - num_below))
    works = [work for *_, work in entries[low:high]]
    before = list(accumulate(works, initial=0))
    target = data.draw(st.floats(0, 1)) * sum(works)
    reach = data.draw(st.floats(0, 0.5)) * sum(works)

    cut = cuts.best(target, reach, num_below=num_below, num_above=num_above)

    number = high - low - cut.above.size
    job, depth, _ = entries[low + number]
    assert (cut.job, cut.depth) == (job, depth)
    assert cut.above.work == sum(works[number:])
    allowed = range(num_below, high - low - num_above + 1)
    distances = {i: abs(before[i] - target) for i in allowed}
    near = [i for i in allowed if distances[i] <= reach]
    if near:
        assert number in near
        assert depth == min(entries[low + i][1] for i in near)
    else:
        assert distances[number] == min(distances.values())


@given(st.lists(st.tuples(paths, costs), min_size=2, max_size=80), st.data())
def test_a_cut_at_a_place_leaves_something_on_both_sides(
    all_jobs: list[tuple[tuple[int, ...], int]], data: st.DataObject
) -> None:
    jobs, entries, low, high, cuts = cut_part(all_jobs, data)
    works = [work for *_, work in entries]
    assert cuts.load == (high - low, sum(works[low:high]))

    for number, (job, depth, _) in enumerate(entries):
        cut = cuts.at(jobs.place_of(job))
        if low < number < high:
            assert cut == (job, depth, (high - number, sum(works[number:high])))
        else:
            assert cut is None


def cut_part(
    all_jobs: list[tuple[tuple[int, ...], int]], data: st.DataObject
) -> tuple[PrefixList, list[tuple[WaitingJob, int, int]], int, int, PrefixCuts]:
    """A list, its entries, and the cuts of a part of it, which is that from ``low`` to ``high``."""
    jobs = filled(all_jobs)
    entries = entries_of(jobs)
    low = data.draw(st.integers(0, len(entries) - 2))
    high = data.draw(st.integers(low + 2, len(entries)))
    start = jobs.place_of(entries[low][0])
    end = jobs.place_of(entries[high][0]) if high < len(entries) else (len(jobs.chunks), 0)
    return jobs, entries, low, high, PrefixCuts(jobs.chunks, start, end)


@given(st.lists(paths, max_size=80), st.integers(0, 3), st.data())
def test_jobs_behind_a_place_are_counted_by_their_prefix(
    all_paths: list[tuple[int, ...]], depth: int, data: st.DataObject
) -> None:
    jobs = filled([(path, 1) for path in all_paths])
    prefix = data.draw(st.sampled_from([*all_paths, (0,), (1, 2, 1)]))[:depth]
    keys = [job.key for job in jobs]
    expected = Counter(key.startswith(key_of(prefix)) for key in keys)[True]

    place = jobs.place_of_prefix(key_of(prefix))

    assert jobs.count_prefix(place, key_of(prefix), 1000) == expected
    assert jobs.count_prefix(place, key_of(prefix), 3) == min(3, expected)


def test_a_prefix_of_the_highest_hashes_is_counted_to_the_end() -> None:
    jobs = PrefixList(TOKENS)
    top = b"\xff" * ROUTING_HASH_BYTES
    for number, key in enumerate((b"\xfe" * ROUTING_HASH_BYTES, top, top + b"\0" * 8)):
        jobs.add(WaitingJob(f"j{number}", "p1:d", f"1-{number}", "m", key))

    assert jobs.count_prefix(jobs.place_of_prefix(top), top, 10) == 2


def test_a_job_that_waits_already_is_refused() -> None:
    jobs = filled([((1,), 5)])
    (job,) = jobs

    with pytest.raises(ValueError, match=job.job_id):
        jobs.add(job)

    assert list(jobs) == [job]


def test_a_job_that_does_not_wait_cannot_be_removed() -> None:
    jobs = filled([((1,), 5)])

    with pytest.raises(KeyError):
        jobs.remove("other")

    assert len(jobs) == 1


def filled(all_jobs: list[tuple[tuple[int, ...], int]]) -> PrefixList:
    jobs = PrefixList(TOKENS)
    for path, cost in all_jobs:
        jobs.add(make_job(path, cost=cost))
    return jobs
