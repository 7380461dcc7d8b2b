"""Block tables and the prefix cache, one rule at a time."""

import pytest

from support.fake_engine import make_seq
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.prefix import hash_blocks
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager

TWELVE = list(range(12))


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> int:
    """Run ``seq`` through the prefix lookup and a step of its own; returns the cached tokens."""
    prefix = manager.find_prefix(seq)
    seq.num_computed_tokens = len(prefix) * manager.block_size
    manager.adopt_prefix(seq, prefix)
    count = seq.num_uncomputed_tokens if num_tokens is None else num_tokens
    assert manager.allocate(seq, count)
    manager.commit_step()
    cached = seq.num_computed_tokens
    seq.num_computed_tokens += count
    return cached


def cached_blocks(manager: BlockManager, prompt: list[int], salt: str | None = None) -> list[int]:
    return manager.find_prefix(make_seq(prompt, salt=salt))


def test_twelve_tokens_with_three_cached_blocks_of_four_hit_only_eight() -> None:
    manager = BlockManager(10, 4)
    compute(manager, make_seq(TWELVE))

    assert compute(manager, make_seq(TWELVE)) == 8
    assert compute(manager, make_seq([*TWELVE, 99])) == 12


def test_block_hashes_are_those_of_the_protocol() -> None:
    """The first is vLLM's own result for the tokens 0 to 3."""
    manager = BlockManager(10, 4)
    plain, salted = make_seq(TWELVE), make_seq(TWELVE, salt="s")
    compute(manager, plain)
    compute(manager, salted)

    golden = "c49ab11fb576db6f376aef58c24f728a0ba1807e8cac5f940f1a5c4c20741898"
    assert plain.block_hashes[0].hex() == golden
    assert plain.block_hashes == hash_blocks(TWELVE, 4)
    assert salted.block_hashes == hash_blocks(TWELVE, 4, (("cache_salt", "s"),))


def test_freed_blocks_are_reused_in_the_order_of_vllm() -> None:
    manager = BlockManager(10, 4)
    seq = make_seq(list(range(14)))
    compute(manager, seq)
    assert seq.block_table == [0, 1, 2, 3]

    manager.free(seq)

    assert [block + 1 for block in manager.free_blocks] == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    assert seq.block_table == []


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_only_full_blocks_are_shared(block_size: int) -> None:
    manager = BlockManager(64, block_size)
    compute(manager, make_seq(TWELVE))

    hits = cached_blocks(manager, [*TWELVE, 99])

    assert len(hits) == 12 // block_size


def test_a_prefix_ends_where_the_tokens_differ() -> None:
    manager = BlockManager(10, 4)
    compute(manager, make_seq(TWELVE))

    assert len(cached_blocks(manager, [0, 1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11, 12])) == 1
    assert cached_blocks(manager, [99, 1, 2, 3, 4, 5, 6, 7, 8]) == []


def test_the_same_tokens_behind_another_prefix_are_not_shared() -> None:
    manager = BlockManager(10, 2)
    compute(manager, make_seq([1, 2, 3, 4, 5]))

    assert cached_blocks(manager, [3, 4, 5]) == []


def test_another_salt_shares_nothing() -> None:
    manager = BlockManager(10, 4)
    compute(manager, make_seq(TWELVE, salt="ours"))

    assert cached_blocks(manager, TWELVE, salt="theirs") == []
    assert cached_blocks(manager, TWELVE) == []
    assert len(cached_blocks(manager, TWELVE, salt="ours")) == 2


def test_without_prefix_caching_nothing_is_shared_or_hashed() -> None:
    manager = BlockManager(10, 4, enable_prefix_caching=False)
    seq = make_seq(TWELVE)
    compute(manager, seq)

    assert cached_blocks(manager, TWELVE) == []
    assert seq.block_hashes == []


def test_a_follower_in_the_same_step_shares_what_the_leader_fills_in_it() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE)
    manager.allocate(leader, 9)

    hits = cached_blocks(manager, [*TWELVE, 99])

    assert hits == leader.block_table[:2]


def test_blocks_of_a_later_chunk_are_not_findable_yet() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE)
    compute(manager, leader, 6)
    assert len(cached_blocks(manager, [*TWELVE, 99])) == 1

    manager.allocate(leader, 6)

    assert len(cached_blocks(manager, [*TWELVE, 99])) == 3


def test_generated_tokens_are_cached_like_prompt_tokens() -> None:
    manager = BlockManager(10, 4)
    seq = make_seq([0, 1, 2])
    compute(manager, seq)
    seq.output_ids.append(3)
    manager.allocate(seq, 1)
    manager.commit_step()

    assert len(cached_blocks(manager, [0, 1, 2, 3, 4])) == 1


def test_a_rolled_back_step_leaves_nothing_to_be_found() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE)
    manager.allocate(leader, 12)

    manager.rollback_step()

    assert cached_blocks(manager, [*TWELVE, 99]) == []
    manager.free(leader)
    manager.check_integrity([])


def test_a_rolled_back_step_keeps_what_earlier_steps_filled() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE)
    compute(manager, leader, 8)
    manager.allocate(leader, 4)

    manager.rollback_step()

    assert len(cached_blocks(manager, [*TWELVE, 99])) == 2


def test_a_leader_that_leaves_before_it_computed_takes_its_promise_back() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE)
    manager.allocate(leader, 12)

    manager.free(leader)

    assert cached_blocks(manager, [*TWELVE, 99]) == []
    assert manager.free_blocks[:3] == (2, 1, 0)


def test_a_leader_cannot_leave_its_followers_in_the_lurch() -> None:
    manager = BlockManager(10, 4)
    leader, follower = make_seq(TWELVE), make_seq(TWELVE)
    manager.allocate(leader, 12)
    manager.adopt_prefix(follower, manager.find_prefix(follower))

    with pytest.raises(AssertionError, match="follower"):
        manager.free(leader)


def test_a_failed_allocation_changes_nothing() -> None:
    manager = BlockManager(2, 4)
    seq = make_seq(TWELVE)

    assert not manager.allocate(seq, 12)

    assert seq.block_table == []
    assert manager.free_blocks == (0, 1)
    assert manager.allocate(seq, 8)


def test_admission_wants_room_for_all_known_tokens() -> None:
    manager = BlockManager(3, 4)

    assert manager.can_admit(make_seq(TWELVE), [])
    assert not manager.can_admit(make_seq([*TWELVE, 12]), [])
    assert not manager.can_admit(make_seq(TWELVE), [], num_reserved_blocks=1)


def test_a_cached_block_nobody_holds_counts_as_used_by_whoever_is_admitted() -> None:
    manager = BlockManager(4, 4)
    first = make_seq(TWELVE)
    compute(manager, first)
    manager.free(first)
    seq = make_seq([*TWELVE, 12, 13])
    prefix = manager.find_prefix(seq)
    assert len(prefix) == 3

    assert manager.can_admit(seq, prefix)
    assert not manager.can_admit(seq, prefix, num_reserved_blocks=1)


def test_a_held_prefix_costs_an_admission_nothing() -> None:
    manager = BlockManager(4, 4)
    compute(manager, make_seq(TWELVE))
    seq = make_seq([*TWELVE, 12, 13])

    assert manager.can_admit(seq, manager.find_prefix(seq))
    assert not manager.can_admit(seq, [])


def test_the_watermark_is_a_share_of_all_blocks() -> None:
    assert BlockManager(1000, 16).num_watermark_blocks == 10
    assert BlockManager(99, 16).num_watermark_blocks == 0
    assert BlockManager(99, 16, watermark=0.05).num_watermark_blocks == 4


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    manager = BlockManager(4, 4)
    first = make_seq(TWELVE)
    compute(manager, first)
    manager.free(first)

    other = make_seq([50, 51, 52, 53, 54, 55])
    compute(manager, other)

    assert manager.num_evictions == 1
    assert len(cached_blocks(manager, [*TWELVE, 99])) == 2


def test_a_prefix_used_again_outlives_one_that_was_not() -> None:
    manager = BlockManager(4, 2)
    old, new = make_seq([1, 2]), make_seq([3, 4])
    for seq in (old, new):
        compute(manager, seq)
        manager.free(seq)
    again = make_seq([1, 2, 9])
    compute(manager, again)
    manager.free(again)

    # The fourth block was never used, and the third holds no full one: both go first.
    compute(manager, make_seq([5, 6, 7, 8, 9]))

    assert cached_blocks(manager, [3, 4, 0]) == []
    assert len(cached_blocks(manager, [1, 2, 0])) == 1


def test_a_follower_awaits_the_block_that_its_leader_fills_next() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE)
    compute(manager, leader, 6)
    follower, stranger = make_seq([*TWELVE, 1]), make_seq([0, 1, 2, 3, 9, 9, 9, 9, 9])
    short = make_seq(TWELVE[:8])

    assert manager.awaits(follower, manager.find_prefix(follower), leader)
    assert not manager.awaits(stranger, manager.find_prefix(stranger), leader)
    assert not manager.awaits(short, manager.find_prefix(short), leader)


def test_nobody_awaits_a_block_that_the_leader_does_not_fill() -> None:
    manager = BlockManager(10, 4)
    leader = make_seq(TWELVE[:7])
    compute(manager, leader, 5)
    follower = make_seq(TWELVE)

    assert not manager.awaits(follower, manager.find_prefix(follower), leader)


def test_usage_is_the_share_of_held_blocks() -> None:
    manager = BlockManager(8, 4)
    seq = make_seq(TWELVE[:7])
    compute(manager, seq)
    assert manager.usage == 0.25

    manager.free(seq)

    assert manager.usage == 0.0


def test_the_integrity_check_notices_a_table_that_the_pool_does_not_know() -> None:
    manager = BlockManager(8, 4)
    seq = make_seq(TWELVE)
    compute(manager, seq)
    manager.check_integrity([seq])
    seq.block_table[0] = 7

    with pytest.raises(AssertionError, match="block 0: 0 holders, count 1"):
        manager.check_integrity([seq])


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "watermark"),
    [(0, 16, 0.01), (8, 0, 0.01), (8, 16, 1.0), (8, 16, -0.1)],
)
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int, watermark: float) -> None:
    with pytest.raises(ConfigError):
        BlockManager(num_blocks, block_size, watermark=watermark)
