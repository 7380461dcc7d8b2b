"""Free blocks that only batch sequences held are reused before what somebody waited for."""

import pytest

from support.fake_engine import make_seq
from tidemill.protocol.prefix import hash_blocks
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.free_blocks import FreeBlocks

NUM_BLOCKS = 16
BATCH, STANDARD, INTERACTIVE = 1, 0, -1


def admit(blocks: BlockManager, prompt: list[int], priority: int) -> Sequence:
    seq = make_seq(prompt, priority=priority)
    prefix = blocks.find_prefix(seq)
    assert blocks.can_admit(seq, prefix)
    blocks.adopt_prefix(seq, prefix)
    seq.num_computed_tokens = len(prefix) * blocks.block_size
    assert blocks.allocate(seq, seq.num_uncomputed_tokens)
    seq.num_computed_tokens = seq.num_tokens
    blocks.commit_step()
    return seq


def run_once(blocks: BlockManager, prompt: list[int], priority: int) -> None:
    """Compute a prompt and leave its blocks to the cache."""
    blocks.free(admit(blocks, prompt, priority))
    blocks.check_integrity([])


def num_cached(blocks: BlockManager, prompt: list[int]) -> int:
    return len(blocks.find_prefix(make_seq([*prompt, 999])))


def flood(blocks: BlockManager, count: int, priority: int = BATCH, start: int = 1000) -> None:
    """Compute ``count`` prompts of four blocks that share nothing."""
    for number in range(start, start + count):
        run_once(blocks, [number] * 4, priority)


@pytest.mark.parametrize("priority", [STANDARD, INTERACTIVE])
def test_batch_work_does_not_flush_what_somebody_waited_for(priority: int) -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, [7] * 8, priority)

    flood(blocks, 50)

    assert num_cached(blocks, [7] * 8) == 8


def test_batch_work_flushes_batch_work() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, [7] * 8, BATCH)

    flood(blocks, 4)

    assert num_cached(blocks, [7] * 8) == 0


def test_a_prefix_stays_watched_when_a_batch_sequence_used_it_last() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, [7] * 4, INTERACTIVE)
    run_once(blocks, [7] * 4 + [1] * 4, BATCH)

    flood(blocks, 50)

    assert num_cached(blocks, [7] * 4 + [1] * 4) == 4


def test_a_batch_prefix_is_watched_once_somebody_waits_for_it() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, [7] * 4, BATCH)
    run_once(blocks, [7] * 4 + [1] * 4, STANDARD)

    flood(blocks, 50)

    assert num_cached(blocks, [7] * 4 + [1] * 4) == 8


def test_what_is_overwritten_is_not_watched_any_more() -> None:
    blocks = BlockManager(4, 1)
    run_once(blocks, [1] * 4, INTERACTIVE)
    run_once(blocks, [2] * 4, BATCH)
    flood(blocks, 1)

    assert num_cached(blocks, [2] * 4) == 0


def test_watched_prefixes_beyond_half_of_the_cache_are_left_to_batch_work() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    for number in range(1, 5):
        run_once(blocks, [number] * 4, INTERACTIVE)

    flood(blocks, 2)

    assert [num_cached(blocks, [number] * 4) for number in range(1, 5)] == [0, 0, 4, 4]
    flood(blocks, 50)
    assert [num_cached(blocks, [number] * 4) for number in range(1, 5)] == [0, 0, 4, 4]


def test_watched_prefixes_make_room_when_nothing_else_is_left() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, [7] * 8, INTERACTIVE)

    seq = admit(blocks, list(range(100, 112)), BATCH)

    assert num_cached(blocks, [7] * 8) == 4
    blocks.check_integrity([seq])


def test_a_hinted_batch_prefix_outlives_a_watched_one() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, [7] * 4, BATCH)
    events = blocks.collect_events()
    assert events is not None
    blocks.hint({events.stored: 3})
    run_once(blocks, [8] * 8, INTERACTIVE)

    seq = admit(blocks, list(range(100, 112)), BATCH)

    assert (num_cached(blocks, [7] * 4), num_cached(blocks, [8] * 8)) == (4, 0)
    blocks.check_integrity([seq])


@pytest.mark.parametrize("priority", [BATCH, STANDARD, INTERACTIVE])
def test_without_other_classes_the_last_use_alone_counts(priority: int) -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    for number in (1, 2, 3, 4, 1, 5, 2):
        run_once(blocks, [number] * 4, priority)

    # 2 was flushed by 5 and flushed 3 in its turn.
    cached = [num_cached(blocks, [number] * 4) for number in range(1, 6)]
    assert cached == [4, 4, 0, 4, 4]


@pytest.mark.parametrize("num_taken", range(1, NUM_BLOCKS + 1))
def test_a_head_of_which_there_are_two_copies_outlives_its_watched_tail(num_taken: int) -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    # Neither finds the other's blocks, so each has a copy; the batch sequence's is found.
    batch, watched = make_seq([7] * 4, priority=BATCH), make_seq([7] * 4, priority=STANDARD)
    for seq in (batch, watched):
        assert blocks.allocate(seq, 4)
        seq.num_computed_tokens = 4
    blocks.commit_step()
    blocks.free(batch)
    watched.output_ids += [1, 1]
    assert blocks.allocate(watched, 2)
    watched.num_computed_tokens = 6
    blocks.commit_step()
    blocks.free(watched)
    prompt = [7] * 4 + [1] * 2
    # It holds the batch sequence's copy of the head and the other's tail.
    run_once(blocks, prompt, BATCH)

    admit(blocks, list(range(1000, 1000 + num_taken)), BATCH)

    find = blocks._pool.find
    found = [find(block_hash) is not None for block_hash in hash_blocks(prompt, 1)]
    assert found == sorted(found, reverse=True)


def test_blocks_without_content_go_first_whoever_held_them() -> None:
    free = FreeBlocks(4)
    blocks = [free.pop() for _ in range(4)]
    for block in blocks[:2]:
        free.append(block)
    free.watch(2)
    free.append(2)
    free.watch(3)

    free.prepend(3)

    assert list(free) == [3, 0, 1, 2]
    free.check_integrity()


@pytest.mark.parametrize("damage", ["lost mark", "stray mark", "too many"])
def test_the_integrity_check_notices_damage(damage: str) -> None:
    free = FreeBlocks(4)
    block = free.pop()
    free.watch(block)
    free.append(block)
    free.check_integrity()
    match damage:
        case "lost mark":
            free.forget(block)
        case "stray mark":
            free.watch(1)
        case "too many":
            free._most_watched = 0

    with pytest.raises(AssertionError):
        free.check_integrity()
