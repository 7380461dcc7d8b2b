"""Who holds which block, and in which order free ones are reused."""

import pytest

from tidemill_gpuworker.memory.block_pool import BlockPool


def test_blocks_are_first_taken_in_ascending_order() -> None:
    pool = BlockPool(5)

    assert pool.take(3) == [0, 1, 2]
    assert pool.free_blocks == (3, 4)
    pool.check_integrity()


def test_the_partial_block_is_reused_first_and_the_head_of_a_prefix_last() -> None:
    """A run of vLLM 0.32 with ten free blocks, whose numbers begin with 1."""
    pool = BlockPool(10)
    table = pool.take(4)
    for block in table[:3]:
        pool.publish(block, bytes([block]))

    pool.release(table)

    assert [block + 1 for block in pool.free_blocks] == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    pool.check_integrity()


def test_several_blocks_without_a_hash_are_reused_from_the_tail() -> None:
    pool = BlockPool(6)
    table = pool.take(4)
    pool.publish(table[0], b"a")

    pool.release(table)

    assert pool.free_blocks == (3, 2, 1, 4, 5, 0)


def test_a_free_block_is_found_until_it_is_taken() -> None:
    pool = BlockPool(2)
    table = pool.take(1)
    pool.publish(table[0], b"a")
    pool.release(table)
    assert pool.find(b"a") == 0

    pool.take(1)
    assert pool.find(b"a") == 0
    assert pool.num_evictions == 0

    pool.take(1)
    assert pool.find(b"a") is None
    assert pool.num_evictions == 1
    pool.check_integrity()


def test_a_touched_free_block_cannot_be_taken() -> None:
    pool = BlockPool(3)
    table = pool.take(3)
    pool.publish(1, b"b")
    pool.release(table)

    pool.touch([1])

    assert not pool.is_free(1)
    assert sorted(pool.take(2)) == [0, 2]
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_a_block_is_free_only_after_its_last_holder_released_it() -> None:
    pool = BlockPool(1)
    table = pool.take(1)
    pool.touch(table)

    pool.release(table)
    assert pool.num_free_blocks == 0
    assert pool.ref_count(0) == 1

    pool.release(table)
    assert pool.num_free_blocks == 1


def test_of_two_blocks_with_the_same_content_one_stays_findable() -> None:
    pool = BlockPool(2)
    pool.take(2)
    pool.publish(0, b"same")
    pool.publish(1, b"same")
    assert pool.find(b"same") == 0
    assert pool.num_cached_hashes == 1

    pool.unpublish(0)

    assert pool.find(b"same") == 1
    pool.check_integrity()


@pytest.mark.parametrize("damage", ["free list", "count", "index", "hash"])
def test_the_integrity_check_notices_damage(damage: str) -> None:
    pool = BlockPool(3)
    pool.publish(pool.take(1)[0], b"a")
    pool.check_integrity()
    match damage:
        case "free list":
            pool._free.pop()
        case "count":
            pool._ref_counts[0] = 0
        case "index":
            pool._blocks_by_hash[b"a"].append(0)
        case "hash":
            pool._hashes[0] = b"b"

    with pytest.raises(AssertionError):
        pool.check_integrity()
