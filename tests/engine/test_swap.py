"""Blocks that leave the device and come back: what moves, when, and that no token changes."""

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copies import BlockCopy
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.places import slot_of
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

EIGHT = list(range(8))


def make_manager(num_blocks: int = 3, num_slots: int = 8, *, swaps: bool = False) -> BlockManager:
    return BlockManager(
        num_blocks, 4, watermark=0.0, num_swap_blocks=num_slots, swap_on_preemption=swaps
    )


def run(manager: BlockManager, tokens: list[int]) -> Sequence:
    """Compute the tokens of a new sequence in one step that ends well."""
    seq = make_seq(tokens)
    prefix = manager.find_prefix(seq)
    assert manager.can_admit(seq, prefix)
    manager.adopt_prefix(seq, prefix)
    seq.num_computed_tokens = 4 * len(prefix)
    assert manager.allocate(seq, seq.num_uncomputed_tokens)
    seq.num_computed_tokens = seq.num_tokens
    manager.commit_step()
    return seq


def evict_all(manager: BlockManager) -> None:
    """Overwrite every block by something without full blocks of use to anybody."""
    manager.free(run(manager, [900 + number for number in range(4 * manager.num_blocks)]))


def test_an_evicted_block_is_copied_out_before_the_step_that_overwrites_it() -> None:
    manager = make_manager()
    first = run(manager, EIGHT)
    blocks = list(first.block_table)
    manager.free(first)
    second = make_seq(list(range(100, 112)))
    assert manager.allocate(second, 12)

    copies = manager.copies

    assert {copy.source for copy in copies.outs} == set(blocks)
    assert (copies.forks, copies.ins) == ((), ())
    manager.commit_step()
    assert not manager.copies


def test_an_evicted_prefix_is_copied_back_instead_of_being_computed() -> None:
    manager = make_manager()
    manager.free(run(manager, EIGHT))
    evict_all(manager)
    seq = make_seq([*EIGHT, 8])

    prefix = manager.find_prefix(seq)
    manager.adopt_prefix(seq, prefix)

    assert all(slot_of(place) is not None for place in prefix)
    assert manager.copies.ins == tuple(
        BlockCopy(slot, block)
        for place, block in zip(prefix, seq.block_table, strict=True)
        if (slot := slot_of(place)) is not None
    )
    assert len(prefix) == 2


def test_what_is_copied_back_counts_as_blocks_to_be_taken() -> None:
    manager = make_manager(num_blocks=3)
    manager.free(run(manager, EIGHT))
    evict_all(manager)
    holder = run(manager, [500])
    seq = make_seq([*EIGHT, 8])
    prefix = manager.find_prefix(seq)
    assert len(prefix) == 2
    assert not manager.can_admit(seq, prefix)
    manager.free(holder)
    assert manager.can_admit(seq, prefix)


def test_a_second_eviction_of_the_same_content_copies_nothing() -> None:
    manager = make_manager()
    manager.free(run(manager, EIGHT))
    evict_all(manager)
    again = run(manager, [*EIGHT, 8])
    blocks = again.block_table[:2]
    manager.free(again)
    other = make_seq(list(range(700, 712)))
    assert manager.allocate(other, 12)
    assert set(blocks) < set(other.block_table)
    assert not {copy.source for copy in manager.copies.outs} & set(blocks)


def test_a_followed_copy_is_shared_in_the_same_step() -> None:
    manager = make_manager(num_blocks=4)
    manager.free(run(manager, EIGHT))
    evict_all(manager)
    leader, follower = make_seq([*EIGHT, 8]), make_seq([*EIGHT, 9])
    manager.adopt_prefix(leader, manager.find_prefix(leader))
    prefix = manager.find_prefix(follower)
    assert prefix == leader.block_table
    manager.adopt_prefix(follower, prefix)
    assert len(manager.copies.ins) == 2


def test_a_failed_step_promises_nothing_in_either_tier() -> None:
    manager = make_manager()
    manager.free(run(manager, EIGHT))
    other = make_seq(list(range(100, 112)))
    assert manager.allocate(other, 12)
    manager.rollback_step()
    manager.free(other)
    assert manager.find_prefix(make_seq([*EIGHT, 8])) == []
    assert manager.tier.num_used == 0
    assert not manager.copies
    manager.check_integrity([])


def test_swap_copies_the_full_blocks_of_a_preempted_sequence_at_once() -> None:
    manager = make_manager(swaps=True)
    seq = run(manager, [*EIGHT, 8])
    full = seq.block_table[:2]
    manager.preempt(seq)
    assert {copy.source for copy in manager.copies.outs} == set(full)
    assert seq.block_table == []


def test_recompute_copies_nothing_before_it_is_overwritten() -> None:
    manager = make_manager()
    manager.preempt(run(manager, [*EIGHT, 8]))
    assert not manager.copies


def test_blocks_that_this_step_was_to_fill_are_not_swapped() -> None:
    manager = make_manager(swaps=True)
    seq = make_seq(EIGHT)
    assert manager.allocate(seq, 8)
    seq.num_computed_tokens = 8
    manager.preempt(seq)
    assert not manager.copies


def test_without_prefix_caching_there_is_no_tier() -> None:
    manager = BlockManager(3, 4, enable_prefix_caching=False, num_swap_blocks=8)
    assert manager.tier.num_slots == 0


@pytest.mark.parametrize("swaps", [False, True])
def test_preempted_sequences_find_all_their_full_blocks_again(swaps: bool) -> None:
    # Ten sequences of up to seven blocks in twelve: everybody is preempted, some more than once.
    manager = make_manager(12, 80, swaps=swaps)
    scheduler = StepScheduler(
        StepConfig(max_model_len=48, max_num_seqs=10, max_num_batched_tokens=64), manager
    )
    runner = FakeRunner(12, 4)
    engine = Engine(runner, FakeSampler(), scheduler, lambda seq: FakeProcessor(20))
    seqs = [make_seq([100 * number + k for k in range(6)], 20) for number in range(10)]
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        engine.step()
        scheduler.check_integrity()

    assert [seq.output_ids for seq in seqs] == [generate(seq.prompt_ids, 20) for seq in seqs]
    assert scheduler.num_preemptions >= 5
    assert sum(len(plan.copies.ins) for plan in runner.plans) >= 5
    starts: dict[str, int] = {}
    for plan in runner.plans:
        for item in plan.scheduled:
            # Less than a block is ever computed again.
            assert item.start > starts.get(item.seq.seq_id, 0) - 4
            starts[item.seq.seq_id] = item.end
