"""How workers part the order of bulk jobs, and take from each other."""

import pytest

from support.scan_orders import (
    TOKENS,
    WORKERS,
    add_all,
    group_of,
    new_order,
    pop,
    pop_all,
)
from support.waiting_jobs import key_of, make_job
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy import prefix_list
from tidemill_scheduler.policy.prefix_order import MAX_FOLLOWERS, PrefixOrder
from tidemill_scheduler.policy.routing_hashes import group_depth


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that a few jobs fill, so that ranges span several."""
    monkeypatch.setattr(prefix_list, "CHUNK_SIZE", 4)
    monkeypatch.setattr(prefix_list, "_SMALL_CHUNK", 2)


def test_an_epoch_begins_with_ranges_of_equal_work() -> None:
    order = new_order(*WORKERS)
    # The jobs of some are ten times those of others, so equal counts would not do.
    for number in range(300):
        order.add(make_job((number,), cost=64 + 640 * (number % 2)))
    total = order.work

    shares = dict.fromkeys(WORKERS, 0)
    for worker in WORKERS:
        while job := order.peek(worker):
            order.take(job, worker)
            shares[worker] += job.cost

    assert sum(shares.values()) == total
    assert max(shares.values()) - min(shares.values()) <= 2 * (64 + 640)


def test_ranges_are_cut_between_groups_if_that_is_near() -> None:
    order = new_order("a", "b")
    groups = [(label, label) for label in range(40)]
    add_all(order, [(*group, label) for group in groups for label in range(2)])

    served = {worker: [] for worker in ("a", "b")}  # type: dict[str, list[WaitingJob]]
    for worker in served:
        while job := order.peek(worker):
            order.take(job, worker)
            served[worker].append(job)

    assert {group_of(job) for job in served["a"]} & {group_of(job) for job in served["b"]} == set()


def test_a_thief_takes_half_of_the_work_and_not_half_of_the_jobs() -> None:
    order = new_order("a")
    *small, big = sorted(((label,) for label in range(20)), key=key_of)
    add_all(order, small, cost=64)
    (costly,) = add_all(order, [big], cost=19 * 64)
    assert order.peek("a") is not None

    assert order.claim_range("b", lambda owner: True)

    assert order.peek("b") == costly


def test_a_thief_takes_from_the_range_with_the_most_work() -> None:
    order = new_order("a", "b")
    add_all(order, [(label,) for label in range(20)], cost=6400)
    while order.peek("a"):
        pop(order, "a")
    left = [job for _ in range(3) if (job := pop(order, "b"))]
    assert len(left) == 3

    assert order.claim_range("c", lambda owner: True)

    stolen, kept = [], []
    while job := order.peek("c"):
        order.take(job, "c")
        stolen.append(job)
    while job := order.peek("b"):
        order.take(job, "b")
        kept.append(job)
    assert abs(len(stolen) - len(kept)) <= 1 and len(stolen) + len(kept) == 7


@pytest.mark.parametrize("full", WORKERS)
def test_a_thief_passes_by_ranges_with_less_work(full: str) -> None:
    order = new_order(*WORKERS)
    jobs = add_all(order, [(label,) for label in range(60)], cost=4096)
    for worker in WORKERS:
        assert order.peek(worker) is not None
    # The ranges of the other two are half done.
    for worker in [worker for worker in WORKERS if worker != full] * 10:
        pop(order, worker)
    assert len(order) == len(jobs) - 20

    assert order.claim_range("d", lambda owner: True)
    served = [job for worker in ("d", full) for job in pop_own(order, worker)]

    assert len(served) == 20


def test_a_group_near_the_middle_is_passed_by_if_another_cut_splits_none() -> None:
    order = new_order("a")
    large, small = sorted([(1, 1), (2, 2)], key=key_of)
    add_all(order, [large] * 20 + [small] * 2, cost=3 * TOKENS)
    assert order.peek("a") is not None

    assert order.claim_range("b", lambda owner: False)

    assert len(pop_own(order, "b")) == 2


def test_workers_that_have_not_asked_yet_are_left_with_what_others_did_not_take() -> None:
    order = new_order(*WORKERS)
    jobs = add_all(order, [(label,) for label in range(6)], cost=20_000)
    jobs.sort(key=lambda job: job.key)
    # One of them has its range; the other two have the rest together.
    is_lowest = order.peek("a") == jobs[0]
    last = jobs.pop() if is_lowest else jobs.pop(0)

    for job in jobs:
        order.take(job, "late")

    found = [order.peek(worker) for worker in WORKERS]
    assert [job for job in found if job] == [last]


def pop_own(order: PrefixOrder, worker: str) -> list[WaitingJob]:
    jobs = []
    while job := order.peek(worker):
        order.take(job, worker)
        jobs.append(job)
    return jobs


def test_a_worker_that_has_a_jobs_prefix_may_take_it_out_of_anothers_range() -> None:
    order = new_order("a", "b")
    add_all(order, [(label, 0) for label in range(8)])
    job = order.peek("a")
    assert job is not None

    order.take(job, "b")

    assert order.peek("a") not in (None, job)
    assert len(order) == 7
    assert len({j.job_id for j in pop_all(order, "a")} - {job.job_id}) == 7


def test_followers_are_those_of_the_workers_range_with_the_prefix_of_its_next_job() -> None:
    order = new_order("a")
    first, second = sorted([(1, 1), (2, 2)], key=key_of)
    add_all(order, [(*first, 1), (*first, 1, 1), (*first, 2), second])

    assert order.followers("a", 2) == 3
    assert order.followers("a", 0) == 4
    pop(order, "a")
    assert order.followers("a", 2) == 2
    assert order.followers("nobody", 2) == 0


def test_followers_are_counted_to_a_limit() -> None:
    order = new_order("a")
    add_all(order, [(1, 1)] * (MAX_FOLLOWERS + 5))

    assert order.followers("a", 2) == MAX_FOLLOWERS


@pytest.mark.parametrize(("tokens", "depth"), [(64, 2), (128, 1), (256, 1), (32, 4), (48, 3)])
def test_a_group_shares_128_tokens_whatever_the_block_size(tokens: int, depth: int) -> None:
    assert group_depth(tokens) == depth


def test_a_thrifty_order_splits_a_group_of_less_work_than_its_prefix_only_at_any_cost() -> None:
    order = PrefixOrder(dict.fromkeys("a"), TOKENS, is_stuck=lambda worker: False)
    prefix = tuple(range(40))
    jobs = add_all(order, [(*prefix, label) for label in range(4)], cost=41 * TOKENS)
    assert pop(order, "a") in jobs

    assert not order.claim_range("b", lambda owner: True)
    assert order.peek("b") is None
    assert order.claim_range("b", lambda owner: False, at_any_cost=True)

    served = [job for worker in "ab" for job in pop_own(order, worker)]
    assert len(served) == 3 and order.peek("b") is None


def test_a_group_is_not_split_for_a_tenant_whose_owner_does_not_yield() -> None:
    order = PrefixOrder(dict.fromkeys("a"), TOKENS, is_stuck=lambda worker: False)
    add_all(order, [(1, 2, 3, label) for label in range(8)], cost=4 * TOKENS)
    pop(order, "a")

    assert not order.claim_range("b", lambda owner: False)
    assert order.claim_range("b", lambda owner: False, at_any_cost=True)
    assert order.peek("b") is not None
