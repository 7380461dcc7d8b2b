"""In which order the jobs of one worker's virtual queue go."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_loads import lane_job
from tidemill_scheduler.policy.bound_job import HEAD_START_SECONDS, BoundJob
from tidemill_scheduler.policy.lazy_heap import LazyHeap
from tidemill_scheduler.policy.load_order import LoadOrder
from tidemill_scheduler.policy.pricing import Price
from tidemill_scheduler.policy.tenant_queue import EXACT_SIZE, PICKS_PER_TURN, TenantQueue
from tidemill_scheduler.policy.virtual_queue import VirtualQueue


def keep_price(_bound: BoundJob) -> None:
    """Nothing changes in the worker's cache."""


def bound_job(
    number: int,
    seconds: float,
    *,
    since: float = 0.0,
    deadline: float = math.inf,
    tenant: str = "t",
) -> BoundJob:
    bound = BoundJob(lane_job(since=since, deadline=deadline, tenant=tenant), number)
    bound.planned = Price(0, 1, seconds)
    bound.set_price(bound.planned)
    return bound


def take_all(queue: TenantQueue, now: float) -> list[int]:
    order = []
    while len(queue):
        bound = queue.pick(now, 0.0)
        assert queue.pick(now, 0.0) is bound
        queue.take(bound)
        order.append(bound.number)
    return order


def test_the_highest_response_ratio_goes_first() -> None:
    queue = TenantQueue(keep_price)
    for number, (seconds, since) in enumerate([(1.0, 0.0), (0.1, 9.5), (5.0, 0.0), (0.1, 8.0)]):
        queue.add(bound_job(number, seconds, since=since))
    # Waits 10, 0.5, 10 and 2 s: ratios 10, 5, 2 and 20.
    assert take_all(queue, 10.0) == [3, 0, 1, 2]


@pytest.mark.parametrize("size", [EXACT_SIZE // 2, 10 * EXACT_SIZE])
def test_every_turn_the_oldest_job_goes_whatever_else_comes(size: int) -> None:
    queue, number = TenantQueue(keep_price), size
    for n in range(size):
        queue.add(bound_job(n, 1e6 if n % 2 else 1e5))
    waiting = list(range(size))
    for pick in range(PICKS_PER_TURN * size):
        # Two jobs for each that goes, all shorter, and with deadlines that have become urgent.
        for _ in range(2):
            queue.add(bound_job(number, 1e-3, since=float(pick), deadline=pick + 1.5))
            number += 1
        bound = queue.pick(pick + 1.0, 10.0)
        queue.take(bound)
        if bound.number < size:
            waiting.remove(bound.number)
        assert all(pick + 1 < PICKS_PER_TURN * (n + 1) for n in waiting[:1])
    assert waiting == []


def test_a_job_that_would_miss_its_deadline_goes_in_the_turn_of_the_urgent() -> None:
    queue = TenantQueue(keep_price)
    for number in range(40):
        queue.add(bound_job(number, 0.1))
    queue.add(bound_job(100, 50.0, deadline=1000.0))
    queue.add(bound_job(101, 50.0, deadline=60.0))
    taken = []
    for _ in range(PICKS_PER_TURN):
        bound = queue.pick(1.0, 20.0)
        queue.take(bound)
        taken.append(bound.number)
    assert taken.index(101) == PICKS_PER_TURN // 2 - 1
    assert 100 not in taken


def test_a_deadline_out_of_reach_does_not_make_another_job_miss_its_own() -> None:
    queue = TenantQueue(keep_price)
    for number in range(40):
        queue.add(bound_job(number, 0.1))
    queue.add(bound_job(100, 50.0, deadline=40.0))
    queue.add(bound_job(101, 50.0, deadline=60.0))
    for _ in range(PICKS_PER_TURN // 2 - 1):
        queue.take(queue.pick(1.0, 20.0))
    assert queue.pick(1.0, 20.0).number == 101


def test_a_deadline_with_time_to_spare_changes_nothing() -> None:
    queue = TenantQueue(keep_price)
    queue.add(bound_job(0, 5.0, deadline=100.0))
    for number in range(1, PICKS_PER_TURN // 2 + 1):
        queue.add(bound_job(number, 0.1))
    for _ in range(PICKS_PER_TURN // 2):
        bound = queue.pick(1.0, 2.0)
        queue.take(bound)
        assert bound.number != 0


def test_prices_are_looked_up_where_they_decide() -> None:
    prices = dict.fromkeys(range(1000), 1.0)

    def reprice(bound: BoundJob) -> None:
        if bound.price.seconds != prices[bound.number]:
            bound.set_price(Price(1, 1, prices[bound.number]))

    queue = TenantQueue(reprice)
    for number in range(1000):
        queue.add(bound_job(number, 1.0 if number != 500 else 0.1))
    assert queue.pick(1.0, 0.0).number == 0

    queue = TenantQueue(reprice)
    prices[7] = 0.01
    for number in range(EXACT_SIZE):
        queue.add(bound_job(number, 1.0))
    assert queue.pick(1.0, 0.0).number == 7


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 100.0), st.floats(0.0, 50.0)),
        min_size=EXACT_SIZE + 1,
        max_size=3 * EXACT_SIZE,
    ),
    st.floats(50.0, 100.0),
)
def test_buckets_pick_a_ratio_close_to_the_highest(
    jobs: list[tuple[float, float]], now: float
) -> None:
    queue = TenantQueue(keep_price)
    for number, (seconds, since) in enumerate(jobs):
        queue.add(bound_job(number, seconds, since=since))
    ratios = [(now - since + HEAD_START_SECONDS) / seconds for seconds, since in jobs]
    # Prefills in one bucket differ by less than a quarter of an octave.
    assert queue.pick(now, 0.0).ratio(now) >= max(ratios) / 2**0.25 * (1 - 1e-9)


def test_a_job_that_left_and_came_back_is_there_once() -> None:
    here, there = TenantQueue(keep_price), TenantQueue(keep_price)
    bound = bound_job(1, 1.0)
    here.add(bound)
    here.remove(bound)
    there.add(bound)
    assert take_all(there, 0.0) == [1]
    here.add(bound)
    assert take_all(here, 0.0) == [1]


def test_a_queue_counts_what_was_planned_and_forgets_rounding() -> None:
    queue = VirtualQueue("w", keep_price)
    jobs = [bound_job(n, 0.1 * n, tenant=f"t{n % 3}") for n in range(1, 10)]
    for bound in jobs:
        queue.add(bound)
    assert queue.seconds == pytest.approx(4.5)
    assert set(queue.tenants) == {"t0", "t1", "t2"}
    assert len(list(queue.samples(4))) == 4
    for bound in jobs:
        queue.take(bound)
        assert bound.worker_id is None
    assert queue.seconds == 0.0
    assert list(queue.tenants) == []


def test_samples_of_a_long_queue_have_all_lengths() -> None:
    queue = TenantQueue(keep_price)
    for number in range(1000):
        queue.add(bound_job(number, 2.0 ** (number % 10)))
    assert {bound.price.seconds for bound in queue.samples(64)} == {2.0**n for n in range(10)}


@given(st.data())
def test_the_least_loaded_workers_are_found_once_their_loads_are_told(data: st.DataObject) -> None:
    loads = {f"w{n}": data.draw(st.integers(0, 9)) for n in range(data.draw(st.integers(1, 40)))}
    order = LoadOrder(loads.__getitem__)
    for worker_id in loads:
        order.add(worker_id)
    for worker_id in data.draw(st.lists(st.sampled_from(sorted(loads)), max_size=60)):
        if data.draw(st.booleans()) and len(loads) > 1 and worker_id in loads:
            del loads[worker_id]
            order.remove(worker_id)
        elif worker_id in loads:
            loads[worker_id] = data.draw(st.integers(0, 9))
            order.changed(worker_id)
        found = order.least(2)
        assert [loads[i] for i in found] == sorted(loads.values())[:2]
        assert len(set(found)) == len(found)


def test_loads_that_fell_unnoticed_are_seen_in_their_turn() -> None:
    loads = {f"w{n}": 5.0 for n in range(100)}
    order = LoadOrder(loads.__getitem__)
    for worker_id in loads:
        order.add(worker_id)
    loads["w77"] = 1.0
    assert "w77" in [order.least(1)[0] for _ in range(100)]
    # And those that rose are put back.
    loads["w77"] = 9.0
    assert order.least(1) != ["w77"]


def test_a_heap_does_not_keep_what_has_left() -> None:
    current: set[int] = set()
    heap = LazyHeap[int](lambda _order, item: item in current)
    rng = random.Random(1)
    for number in range(10_000):
        current.add(number)
        heap.push(rng.random(), number, number)
        if len(current) > 5:
            current.remove(rng.choice(sorted(current)))
    assert heap.first() in current
    assert len(heap._entries) < 200
