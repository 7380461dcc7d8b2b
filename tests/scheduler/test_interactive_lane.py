"""Jobs bound to workers in the daemon's memory."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.fake_loads import FakeLoads, lane_job
from support.waiting_jobs import key_of
from tidemill.protocol.messages import KvEvents
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.interactive_lane import InteractiveLane
from tidemill_scheduler.policy.residency import Residency
from tidemill_scheduler.policy.tenant_queue import PICKS_PER_TURN

PATHS = st.lists(st.integers(0, 2), max_size=5)


def make_lane(*worker_ids: str) -> tuple[InteractiveLane, Residency, FakeLoads]:
    residency, loads = Residency(64), FakeLoads(*worker_ids)
    for worker_id in worker_ids:
        residency.add_worker(worker_id, 10_000)
    return InteractiveLane(residency, loads), residency, loads


def hold(residency: Residency, worker_id: str, path: tuple[int, ...]) -> None:
    residency.reset(worker_id, 1, key_of(path))


def jobs_for(lane: InteractiveLane, worker_id: str) -> list[WaitingJob]:
    """Return those that are bound to a worker, in the order they came."""
    queue = lane._queues.get(worker_id) or ()
    return [bound.job for bound in sorted(queue, key=lambda bound: bound.number)]


LONG = tuple(range(10))


def test_a_job_waits_for_the_worker_that_holds_its_prefix() -> None:
    lane, residency, loads = make_lane("a", "b")
    hold(residency, "b", LONG)
    loads.busy["b"] = 3.0
    assert lane.add(lane_job(LONG), 0.0) == "b"


def test_a_job_does_not_wait_for_its_prefix_longer_than_that_is_worth() -> None:
    lane, residency, loads = make_lane("a", "b")
    hold(residency, "b", LONG)
    # 640 of 1000 tokens at a millisecond each, nine times.
    loads.busy["b"] = 9 * 0.64 + 0.01
    assert lane.add(lane_job(LONG), 0.0) == "a"


def test_a_job_without_a_prefix_goes_to_the_least_loaded_worker() -> None:
    lane, _, loads = make_lane("a", "b", "c")
    loads.busy |= {"a": 1.0, "c": 2.0}
    assert lane.add(lane_job((1,), cost=1500), 0.0) == "b"
    # Now "b" is between the others, and with one more job "a" has 2 s before it.
    assert lane.add(lane_job((2,)), 0.0) == "a"
    assert lane.add(lane_job((3,)), 0.0) == "b"


def test_sequences_that_produce_tokens_count_as_load() -> None:
    lane, _, loads = make_lane("a", "b")
    loads.decoding["a"] = 1.0
    assert lane.add(lane_job(), 0.0) == "b"


def test_jobs_that_share_a_prompt_wait_for_the_same_worker() -> None:
    lane, _, _ = make_lane("a", "b", "c", "d")
    homes = {lane.add(lane_job((*LONG, n)), 0.0) for n in range(5)}
    assert len(homes) == 1
    assert lane.work == 1000 + 4 * 360


def test_a_large_group_spreads_once_waiting_costs_more_than_its_prefix() -> None:
    lane, _, _ = make_lane("a", "b")
    homes = [lane.add(lane_job((*LONG, n)), 0.0) for n in range(100)]
    assert set(homes) == {"a", "b"}
    assert abs(homes.count("a") - homes.count("b")) < 30


def test_a_prompt_on_its_way_to_a_worker_is_followed_there() -> None:
    lane, residency, loads = make_lane("a", "b")
    residency.dispatched("a", key_of(LONG))
    loads.busy["a"] = 100.0
    assert lane.add(lane_job((*LONG, 1)), 0.0) == "a"
    # Most of this one is its own.
    assert lane.add(lane_job((*LONG, 2), cost=4000), 0.0) == "b"


def test_a_worker_that_cannot_hold_a_job_does_not_get_it() -> None:
    lane, residency, loads = make_lane("a", "b", "c", "d")
    hold(residency, "a", LONG)
    loads.capacity |= {"a": 500, "b": 500, "c": 500}
    loads.busy["d"] = 50.0
    assert lane.add(lane_job(LONG), 0.0) == "d"


def test_a_short_prefill_overtakes_and_a_long_wait_wins() -> None:
    lane, _, _ = make_lane("a")
    long, short = lane_job((1,), cost=5000), lane_job((2,), cost=90, since=1.0)
    lane.add(long, 1.0)
    lane.add(short, 1.0)
    assert lane.peek("a", "t", 1.0) is short
    late = lane_job((3,), cost=100, since=9.999)
    lane.remove(short)
    lane.add(late, 9.999)
    assert lane.peek("a", "t", 10.0) is long


@pytest.mark.parametrize("num_others", [1, 100])
@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_job_whose_sibling_was_sent_becomes_a_short_one(
    num_others: int, is_told_first: bool
) -> None:
    lane, residency, _ = make_lane("a")
    leader, follower = lane_job((*LONG, 1)), lane_job((*LONG, 2), cost=700)
    others = [lane_job((5, n), cost=500) for n in range(num_others)]
    for job in (leader, follower, *others):
        lane.add(job, 0.0)
    assert lane.peek("a", "t", 0.0) is others[0]
    if is_told_first:
        residency.dispatched("a", leader.kv_key)
    lane.take(leader, "a", 0.0)
    if not is_told_first:
        residency.dispatched("a", leader.kv_key)
    assert lane.peek("a", "t", 0.0) is follower


def test_an_idle_worker_takes_what_costs_least_to_move() -> None:
    lane, residency, loads = make_lane("a", "b")
    hold(residency, "a", LONG)
    loads.busy["b"] = 100.0
    cold = lane_job((7, 7, 7))
    for job in (*(lane_job((*LONG, n)) for n in range(4)), cold):
        assert lane.add(job, 0.0) == "a"

    loads.busy["b"] = 0.0
    assert lane.steal("b", 0.0) is cold
    assert jobs_for(lane, "b") == [cold]
    assert lane.peek("b", "t", 0.0) is cold


def test_a_worker_does_not_take_what_it_would_have_to_compute_anew() -> None:
    lane, residency, _ = make_lane("a", "b")
    hold(residency, "a", LONG)
    lane.add(lane_job(LONG), 0.0)
    # 0.36 s of waiting against twice 0.64 s.
    assert lane.steal("b", 0.0) is None


def test_the_leader_of_a_waiting_group_is_not_taken_from_its_followers() -> None:
    lane, _, _ = make_lane("a", "b")
    [home] = {lane.add(lane_job((*LONG, n), cost=700), 0.0) for n in range(2)}
    other = "b" if home == "a" else "a"
    # 0.76 s of waiting against twice the 0.64 s that both share.
    assert lane.steal(other, 0.0) is None


def test_jobs_wait_for_the_first_worker() -> None:
    lane, residency, loads = make_lane()
    job = lane_job((1,))
    assert lane.add(job, 0.0) is None
    assert len(lane) == 1
    residency.add_worker("a", 100)
    loads.workers["a"] = None
    assert set(lane.tenants("a")) == {"t"}
    assert lane.peek("a", "t", 0.0) is job


def test_jobs_of_a_worker_that_is_gone_wait_for_another() -> None:
    lane, residency, loads = make_lane("a", "b")
    hold(residency, "a", LONG)
    jobs = [lane_job((*LONG, n)) for n in range(3)]
    for job in jobs:
        assert lane.add(job, 0.0) == "a"
    del loads.workers["a"]
    residency.remove_worker("a")
    lane.release("a", 0.0)
    assert jobs_for(lane, "b") == jobs
    assert list(lane.tenants("a")) == []
    assert lane.peek("a", "t", 0.0) is None


def test_a_worker_released_while_it_stays_gets_nothing_until_it_comes_back() -> None:
    lane, _, loads = make_lane("a", "b")
    loads.busy["b"] = 100.0
    job = lane_job()
    assert lane.add(job, 0.0) == "a"
    lane.release("a", 0.0)
    assert jobs_for(lane, "b") == [job]
    assert lane.add(lane_job(), 0.0) == "b"
    assert lane.steal("a", 0.0) is None
    del loads.workers["a"]
    lane.release("a", 0.0)
    loads.workers["a"] = None
    assert lane.add(lane_job(), 0.0) == "a"


def test_a_job_can_be_sent_elsewhere_than_it_waits() -> None:
    lane, _, _ = make_lane("a", "b")
    job = lane_job()
    home = lane.add(job, 0.0)
    lane.take(job, "b" if home == "a" else "a", 0.0)
    assert len(lane) == 0
    assert lane.work == 0
    with pytest.raises(KeyError):
        lane.remove(job)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """No job is lost or told twice, and each is gone in its time."""

    NAMES = ("a", "b", "c")
    TENANTS = ("s", "t")

    def __init__(self) -> None:
        super().__init__()
        self.lane, self.residency, self.loads = make_lane("a")
        self.waiting: dict[str, WaitingJob] = {}
        self.now = 0.0
        #: Picks of its queue that a job may still see, while it stays where it is.
        self.picks_left: dict[str, tuple[str, int]] = {}

    @rule(path=PATHS, cost=st.integers(0, 2000), tenant=st.sampled_from(TENANTS))
    def add(self, path: list[int], cost: int, tenant: str) -> None:
        cost = max(cost, 64 * len(path))
        job = lane_job(path, cost=cost, since=self.now, tenant=tenant, deadline=self.now + 9)
        self.lane.add(job, self.now)
        self.waiting[job.job_id] = job

    @precondition(lambda self: self.loads.workers)
    @rule(data=st.data(), tells=st.booleans())
    def send(self, data: st.DataObject, tells: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.loads.workers)))
        tenants = sorted(self.lane.tenants(worker_id))
        if not tenants:
            assert self.lane.peek(worker_id, "s", self.now) is None
            return
        tenant = data.draw(st.sampled_from(tenants))
        self._limit_waits(worker_id, tenant)
        job = self.lane.peek(worker_id, tenant, self.now)
        assert job is self.lane.peek(worker_id, tenant, self.now)
        assert job is not None and job.tenant == tenant
        assert self.waiting.pop(job.job_id) is job
        self.residency.dispatched(worker_id, job.kv_key)
        self.lane.take(job, worker_id, self.now)
        if tells:
            self.residency.arrived(worker_id, job.kv_key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.lane.remove(job)

    @rule(worker_id=st.sampled_from(NAMES), busy=st.floats(0, 10))
    def load(self, worker_id: str, busy: float) -> None:
        self.loads.busy[worker_id] = busy
        self.lane.refresh(worker_id)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker_id=st.sampled_from(NAMES))
    def join(self, worker_id: str) -> None:
        if worker_id not in self.loads.workers:
            self.residency.add_worker(worker_id, 20)
            self.loads.workers[worker_id] = None

    @rule(worker_id=st.sampled_from(NAMES))
    def leave(self, worker_id: str) -> None:
        if worker_id in self.loads.workers:
            del self.loads.workers[worker_id]
            self.residency.remove_worker(worker_id)
        self.lane.release(worker_id, self.now)

    @rule(worker_id=st.sampled_from(NAMES))
    def bar(self, worker_id: str) -> None:
        self.lane.release(worker_id, self.now)
        assert list(self.lane.tenants(worker_id)) == []

    @rule(worker_id=st.sampled_from(NAMES))
    def steal(self, worker_id: str) -> None:
        job = self.lane.steal(worker_id, self.now)
        if job is not None:
            assert self.waiting[job.job_id] is job
            assert job in jobs_for(self.lane, worker_id)

    @rule(worker_id=st.sampled_from(NAMES), path=PATHS)
    def evict(self, worker_id: str, path: list[int]) -> None:
        if worker_id in self.loads.workers:
            self.residency.reset(worker_id, 0, key_of(path))
            assert self.residency.apply(worker_id, KvEvents(seq=1))

    @invariant()
    def all_that_wait_are_there_once(self) -> None:
        assert len(self.lane) == len(self.waiting)
        bound = [job.job_id for name in self.NAMES for job in jobs_for(self.lane, name)]
        assert len(set(bound)) == len(bound) and self.waiting.keys() >= set(bound)
        for worker_id in self.NAMES:
            queue = self.lane._queues.get(worker_id)
            assert queue is None or (queue.seconds > 0) == (len(jobs_for(self.lane, worker_id)) > 0)
        assert len(bound) <= self.lane.work <= sum(max(1, j.cost) for j in self.waiting.values())

    def _limit_waits(self, worker_id: str, tenant: str) -> None:
        """Check that the pick to come is within the bound of every job of its queue.

        Jobs of other queues may be bound to this one at any time and keep their place in the
        order of arrival, so that they count from the start.
        """
        jobs = [job for job in self.waiting.values() if job.tenant == tenant]
        bound = {job.job_id for job in jobs_for(self.lane, worker_id)}
        for place, job in enumerate(jobs, 1):
            if job.job_id not in bound:
                continue
            limit = (worker_id, PICKS_PER_TURN * place)
            home, left = self.picks_left.get(job.job_id, limit)
            if home != worker_id:
                left = limit[1]
            assert left > 0
            self.picks_left[job.job_id] = (worker_id, left - 1)


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def test_a_worker_that_comes_as_one_that_drained_goes_is_taken_in() -> None:
    lane, residency, loads = make_lane("a", "b")
    lane.add(lane_job((1,)), 0.0)
    lane.release("b", 0.0)
    residency.add_worker("c", 10_000)
    loads.workers["c"] = None
    residency.remove_worker("b")
    del loads.workers["b"]
    lane.release("b", 0.0)
    loads.busy["a"] = 100.0
    assert lane.add(lane_job((2,)), 0.0) == "c"


def test_a_job_that_is_taken_over_is_planned_with_what_the_thief_holds() -> None:
    lane, residency, loads = make_lane("victim", "thief")
    hold(residency, "thief", LONG)
    loads.busy["thief"] = 1000.0
    for number in range(2):
        assert lane.add(lane_job((*LONG, number), cost=1000), 0.0) == "victim"
    assert lane.work == 1000 + 360

    loads.busy = {"victim": 1000.0}
    assert lane.steal("thief", 0.0) is not None
    # Either the one that was to compute what both share is here now, or the other one is.
    assert lane.work in (360 + 360, 1000 + 360)
    [stolen] = jobs_for(lane, "thief")
    [kept] = jobs_for(lane, "victim")
    planned = {b.job.job_id: b.planned.uncached for b in lane._bound.values()}
    assert planned[stolen.job_id] == 360
    assert planned[kept.job_id] in (360, 1000)
