"""Models that look back a limited distance: blocks behind it are given back early."""

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.places import NO_BLOCK
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

WINDOW = 6


def make_manager(num_blocks: int = 16) -> BlockManager:
    return BlockManager(num_blocks, 4, watermark=0.0, window=WINDOW)


def advance(manager: BlockManager, seq: Sequence, num_tokens: int) -> None:
    assert manager.allocate(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    manager.commit_step()


@pytest.mark.parametrize(
    ("position", "num_null"), [(8, 0), (9, 1), (12, 1), (13, 2), (16, 2), (17, 3)]
)
def test_a_block_goes_as_soon_as_no_token_to_come_reads_it(position: int, num_null: int) -> None:
    # Position 9 sees 4 to 9, so block 0 (positions 0 to 3) is not needed any more.
    manager = make_manager()
    seq = make_seq(list(range(20)))
    advance(manager, seq, position)
    advance(manager, seq, 1)
    assert seq.block_table.count(NO_BLOCK) == num_null == seq.num_null_blocks
    assert NO_BLOCK not in seq.block_table[num_null:]
    manager.check_integrity([seq])


def test_a_chunk_keeps_what_its_first_token_reads() -> None:
    manager = make_manager()
    seq = make_seq(list(range(40)))
    advance(manager, seq, 12)
    advance(manager, seq, 28)
    assert seq.block_table.count(NO_BLOCK) == 1


def test_a_prefix_is_found_by_its_last_blocks_alone() -> None:
    manager = make_manager(num_blocks=8)
    first = make_seq(list(range(20)))
    for _ in range(20):
        advance(manager, first, 1)
    manager.free(first)
    # The heads of the prefix are overwritten; its last two blocks are still there.
    other = make_seq(list(range(100, 116)))
    advance(manager, other, 16)
    assert manager.find_prefix(make_seq([0, 1, 2, 3, 4])) == []

    seq = make_seq([*range(20), 99])
    prefix = manager.find_prefix(seq)

    assert [place == NO_BLOCK for place in prefix] == [True, True, True, False, False]
    manager.adopt_prefix(seq, prefix)
    assert seq.num_null_blocks == 3
    manager.check_integrity([other, seq])


def test_a_prefix_with_a_hole_in_the_window_is_found_up_to_the_hole() -> None:
    manager = make_manager()
    first = make_seq(list(range(8)))
    advance(manager, first, 8)
    tail = make_seq([*range(8), *range(50, 54), 7])
    assert len(manager.find_prefix(tail)) == 2


def test_a_failed_step_can_be_run_again_behind_the_window() -> None:
    manager = make_manager()
    seq = make_seq(list(range(20)))
    advance(manager, seq, 13)
    assert manager.allocate(seq, 7)
    manager.rollback_step()
    assert manager.allocate(seq, 1)
    first_read = (seq.num_computed_tokens - WINDOW + 1) // 4
    assert NO_BLOCK not in seq.block_table[first_read:]


def test_sequences_longer_than_the_cache_could_hold_share_it() -> None:
    # Without early returns four sequences of 40 tokens would need 40 blocks.
    manager = make_manager(num_blocks=16)
    scheduler = StepScheduler(
        StepConfig(max_model_len=60, max_num_seqs=4, max_num_batched_tokens=16), manager
    )
    engine = Engine(
        FakeRunner(16, 4, WINDOW), FakeSampler(), scheduler, lambda seq: FakeProcessor(30)
    )
    seqs = [make_seq([100 * number + k for k in range(10)], 30) for number in range(4)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        engine.step()
        scheduler.check_integrity()
    expected = [generate(seq.prompt_ids, 30, WINDOW) for seq in seqs]
    assert [seq.output_ids for seq in seqs] == expected
    assert scheduler.num_preemptions == 0
