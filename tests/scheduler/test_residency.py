"""The shadow of the workers' prefix caches."""

from hypothesis import given
from hypothesis import strategies as st

from support.waiting_jobs import key_of
from tidemill_scheduler.residency import Residency


def test_a_worker_holds_the_common_part_of_what_it_was_given() -> None:
    residency = Residency()
    residency.add_worker("a", 100)
    residency.dispatched("a", key_of((1, 2, 3)))

    assert residency.depth("a", key_of((1, 2, 3, 4))) == 3
    assert residency.depth("a", key_of((1, 2, 9))) == 2
    assert residency.depth("a", key_of((7,))) == 0


def test_the_last_worker_that_got_a_prefix_is_its_holder() -> None:
    residency = Residency()
    for worker in ("a", "b"):
        residency.add_worker(worker, 100)
        residency.dispatched(worker, key_of((1, 2, 3)))

    assert residency.holder(key_of((1, 2, 9)), 2) == "b"
    assert residency.holder(key_of((1,)), 2) is None


def test_a_removed_worker_holds_nothing() -> None:
    residency = Residency()
    residency.add_worker("a", 100)
    residency.dispatched("a", key_of((1, 2)))
    residency.remove_worker("a")
    residency.add_worker("a", 100)

    assert residency.holder(key_of((1, 2)), 2) is None
    assert residency.depth("a", key_of((1, 2))) == 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30), st.integers(1, 12))
def test_a_full_cache_forgets_tails_first_and_the_last_job_stays(
    given_paths: list[list[int]], capacity: int
) -> None:
    residency = Residency()
    residency.add_worker("a", capacity)
    for path in given_paths:
        residency.dispatched("a", key_of(path))
        assert residency.depth("a", key_of(path)) == min(len(path), capacity)
