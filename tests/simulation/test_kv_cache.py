import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_scheduler.simulation.kv_cache import KvCache


def hold(cache: KvCache, chain: tuple[int, ...], extra: int = 0) -> tuple[int, int]:
    """Admit a sequence with a chain and private blocks; returns (found, unpublished) ."""
    depth = cache.find(chain)
    num_blocks = 4 * len(chain) + extra
    cache.reserve(chain, depth, cache.count_new(chain, depth, num_blocks))
    if depth < len(chain):
        cache.publish(chain[depth:])
    return depth, extra


def test_the_tail_of_a_prefix_is_evicted_before_what_it_hangs_on() -> None:
    cache = KvCache(16)
    cache.free((1, 2, 3), hold(cache, (1, 2, 3))[1])
    hold(cache, (7, 8))

    assert cache.find((1, 2, 3)) == 2
    assert cache.take_changes() == ([1, 2, 7, 8], [])


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = KvCache(12)
    for chain in [(1,), (2,), (3,), (1,)]:
        cache.free(chain, hold(cache, chain)[1])
    hold(cache, (4,))

    assert [cache.find((number,)) for number in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_blocks_of_two_sequences_are_counted_once() -> None:
    cache = KvCache(100)
    hold(cache, (1, 2), extra=3)
    hold(cache, (1, 2, 5), extra=1)

    assert cache.num_pinned == 4 * 3 + 3 + 1
    cache.free((1, 2), 3)
    assert cache.num_pinned == 4 * 3 + 1
    cache.free((1, 2, 5), 1)
    assert cache.num_pinned == 0
    assert cache.find((1, 2, 5)) == 3


def test_content_that_two_sequences_computed_is_kept_once() -> None:
    cache = KvCache(100)
    # Both were admitted before either was findable.
    for _ in range(2):
        cache.reserve((1, 2), 0, cache.count_new((1, 2), 0, 8))
    assert cache.num_pinned == 16
    cache.publish((1, 2))
    cache.publish((1, 2))

    assert cache.num_pinned == 8
    cache.free((1, 2), 0)
    cache.free((1, 2), 0)
    assert cache.num_pinned == 0


def test_a_hash_that_comes_back_at_once_is_not_told_as_evicted() -> None:
    cache = KvCache(8)
    cache.free((1,), hold(cache, (1,))[1])
    cache.take_changes()
    hold(cache, (2,), extra=4)
    cache.free((2,), 4)
    hold(cache, (1,), extra=4)

    assert cache.take_changes() == ([1], [])


def test_a_hinted_prefix_is_evicted_last_and_no_longer_once_the_hint_is_dropped() -> None:
    cache = KvCache(16)
    cache.hint({2: 5})
    cache.free((1, 2, 3), hold(cache, (1, 2, 3))[1])
    for chain in [(7,), (8,), (9,)]:
        cache.free(chain, hold(cache, chain)[1])
    assert (cache.find((1, 2, 3)), cache.find((8,)), cache.find((9,))) == (2, 1, 1)

    cache.hint({2: 0})
    for chain in [(10,), (11,), (12,)]:
        cache.free(chain, hold(cache, chain)[1])
    assert cache.find((1, 2, 3)) == 1


def test_hinted_prefixes_make_room_when_nothing_else_is_left() -> None:
    cache = KvCache(8)
    cache.hint({2: 5})
    cache.free((1, 2), hold(cache, (1, 2))[1])
    hold(cache, (7,))

    assert (cache.find((1, 2)), cache.num_free) == (1, 4)


def use(cache: KvCache, chain: tuple[int, ...], *, is_batch: bool) -> None:
    """Admit a sequence with a chain, and let it end."""
    hold(cache, chain)
    cache.free(chain, 0, is_batch=is_batch)


def test_batch_work_does_not_flush_what_somebody_waited_for() -> None:
    cache = KvCache(24)
    use(cache, (1, 2), is_batch=False)
    for number in range(10, 30):
        use(cache, (number,), is_batch=True)

    assert cache.find((1, 2)) == 2
    assert sorted(cache.digests()) == [1, 2, 26, 27, 28, 29]


def test_a_prefix_stays_watched_when_a_batch_sequence_used_it_last() -> None:
    cache = KvCache(24)
    use(cache, (1, 2), is_batch=False)
    use(cache, (1, 2, 3), is_batch=True)
    for number in range(10, 30):
        use(cache, (number,), is_batch=True)

    assert cache.find((1, 2, 3)) == 2


def test_watched_prefixes_beyond_half_of_the_cache_are_left_to_batch_work() -> None:
    cache = KvCache(24)
    for number in range(1, 7):
        use(cache, (number,), is_batch=False)
    for number in range(10, 30):
        use(cache, (number,), is_batch=True)

    assert [number for number in range(1, 7) if cache.find((number,))] == [4, 5, 6]


def test_watched_prefixes_make_room_when_nothing_else_is_left() -> None:
    cache = KvCache(16)
    use(cache, (1, 2), is_batch=False)
    hold(cache, (7, 8, 9))

    assert cache.find((1, 2)) == 1


def test_what_is_evicted_is_not_watched_when_it_comes_back() -> None:
    cache = KvCache(16)
    use(cache, (1, 2), is_batch=False)
    use(cache, (5, 6, 7, 8), is_batch=True)
    use(cache, (1, 2), is_batch=True)
    for number in range(10, 30):
        use(cache, (number,), is_batch=True)

    assert cache.find((1, 2)) == 0


def test_a_hinted_batch_prefix_outlives_a_watched_one_until_the_hint_is_dropped() -> None:
    cache = KvCache(16)
    cache.hint({2: 5})
    use(cache, (1, 2), is_batch=True)
    use(cache, (3,), is_batch=False)
    hold(cache, (7, 8))
    assert (cache.find((1, 2)), cache.find((3,))) == (2, 0)

    cache.free((7, 8), 0, is_batch=True)
    cache.hint({2: 0})
    use(cache, (3,), is_batch=False)
    for number in range(10, 30):
        use(cache, (number,), is_batch=True)
    assert (cache.find((1, 2)), cache.find((3,))) == (0, 1)


@pytest.mark.parametrize("is_batch", [True, False])
def test_without_other_classes_the_last_use_alone_counts(is_batch: bool) -> None:
    cache = KvCache(16)
    for number in (1, 2, 3, 4, 1, 5, 2):
        use(cache, (number,), is_batch=is_batch)

    # 2 was flushed by 5 and flushed 3 in its turn.
    assert [number for number in range(1, 6) if cache.find((number,))] == [1, 2, 4, 5]


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["run", "batch", "end", "hint"]), PATHS, st.integers(0, 3)))
)
def test_a_cache_agrees_with_sets_of_prefixes(steps: list[tuple[str, list[int], int]]) -> None:
    cache = KvCache(60)
    running: list[tuple[tuple[int, ...], int]] = []
    classes: list[bool] = []
    told: set[int] = set()
    for kind, path, extra in steps:
        # Digits of base 4 number the prefixes of a path.
        chain = tuple(
            sum(4**i * (n + 1) for i, n in enumerate(path[:d])) for d in range(1, len(path) + 1)
        )
        if kind == "end" and running:
            number = extra % len(running)
            cache.free(*running.pop(number), is_batch=classes.pop(number))
        elif kind == "hint":
            cache.hint({chain[-1]: extra})
        else:
            held = {digest for other, _ in running for digest in other}
            need = 4 * len(held | set(chain)) + extra + sum(other for _, other in running)
            if need <= 60:
                hold(cache, chain, extra)
                running.append((chain, extra))
                classes.append(kind == "batch")
        held = {digest for chain, _ in running for digest in chain}
        stored, evicted = cache.take_changes()
        told = (told | set(stored)) - set(evicted)

        assert cache.num_pinned == 4 * len(held) + sum(extra for _, extra in running)
        assert set(cache.digests()) == told
        assert held <= told
        assert len(told) * 4 + sum(extra for _, extra in running) <= 60
        for other, _ in running:
            assert cache.find(other) == len(other)
        # Prefix-closed, so that the binary search tells what a walk finds.
        known = next((d for d, digest in enumerate(chain) if digest not in told), len(chain))
        assert cache.find(chain) == known
