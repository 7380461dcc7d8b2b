"""Sequences that share their beginning and go on by themselves: copies on write."""

import pytest

from support.fake_engine import FakeRunner, generate, make_seq, next_token
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_copies import BlockCopy
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan


def make_manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, 4, watermark=0.0)


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    seq = make_seq(tokens)
    assert manager.allocate(seq, len(tokens))
    seq.num_computed_tokens = len(tokens)
    manager.commit_step()
    return seq


def forked(manager: BlockManager, parent: Sequence, token: int) -> Sequence:
    child = make_seq([*parent.token_slice(0, parent.num_computed_tokens), token])
    manager.fork(parent, child)
    return child


def test_a_fork_takes_no_block() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    free = manager.num_free_blocks
    child = forked(manager, parent, 7)
    assert child.block_table == parent.block_table
    assert child.num_computed_tokens == 6
    assert manager.num_free_blocks == free
    manager.check_integrity([parent, child])


def test_the_first_writer_gets_a_copy_and_the_last_one_writes_in_place() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    children = [forked(manager, parent, token) for token in (7, 8)]
    shared = parent.block_table[1]
    parent.output_ids.append(9)

    for seq in (*children, parent):
        assert manager.allocate(seq, 1)

    targets = [child.block_table[1] for child in children]
    assert manager.copies.forks == tuple(BlockCopy(shared, target) for target in targets)
    assert parent.block_table[1] == shared
    assert len({shared, *targets}) == 3
    assert all(seq.block_table[0] == parent.block_table[0] for seq in children)


def test_full_blocks_are_shared_without_a_copy() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3, 4])
    child = forked(manager, parent, 5)
    assert manager.allocate(child, 1)
    assert not manager.copies
    assert child.block_table[0] == parent.block_table[0]


def test_without_a_free_block_for_the_copy_nothing_changes() -> None:
    manager = make_manager(num_blocks=2)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = forked(manager, parent, 7)
    assert not manager.allocate(child, 1)
    assert child.block_table == parent.block_table
    manager.free(parent)
    assert manager.allocate(child, 1)
    assert not manager.copies
    manager.check_integrity([child])


def test_a_failed_step_gives_the_shared_block_back() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = forked(manager, parent, 7)
    assert manager.allocate(child, 1)
    manager.rollback_step()
    assert child.block_table == parent.block_table
    manager.check_integrity([parent, child])


def test_whoever_leaves_within_the_step_takes_its_copy_along() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = forked(manager, parent, 7)
    assert manager.allocate(child, 1)
    manager.free(child)
    assert not manager.copies
    manager.check_integrity([parent])


def test_who_filled_a_block_that_others_are_copied_from_may_leave_within_the_step() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3])
    child = forked(manager, parent, 7)
    parent.output_ids.append(9)
    assert manager.allocate(child, 1) and manager.allocate(parent, 1)
    manager.preempt(parent)
    assert manager.find_prefix(make_seq([1, 2, 3, 9, 5])) == []
    manager.commit_step()
    manager.check_integrity([child])


def test_a_child_must_begin_like_its_parent() -> None:
    manager = make_manager()
    parent = computed(manager, [1, 2, 3])
    with pytest.raises(AssertionError, match="does not begin like"):
        manager.fork(parent, make_seq([1, 2, 9, 4]))


@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_three_branches_generate_what_each_would_alone(length: int) -> None:
    manager, runner = make_manager(24), FakeRunner(24, 4)
    parent = make_seq(list(range(length)))
    assert manager.allocate(parent, length)
    parent.num_computed_tokens = length
    runner.execute(StepPlan((ScheduledSequence(parent, 0, length),)))
    manager.commit_step()
    branches = [forked(manager, parent, token) for token in (50, 60)]
    parent.output_ids.append(next_token(parent.prompt_ids))
    branches.append(parent)
    starts = [list(seq.token_slice(0, seq.num_tokens)) for seq in branches]
    for _ in range(9):
        for seq in branches:
            assert manager.allocate(seq, 1)
        items = tuple(ScheduledSequence(seq, seq.num_computed_tokens, 1) for seq in branches)
        tokens = runner.execute(StepPlan(items, copies=manager.copies))
        for seq, token in zip(branches, tokens, strict=True):
            seq.num_computed_tokens += 1
            seq.output_ids.append(token)
        manager.commit_step()
        manager.check_integrity(branches)
    for seq, start in zip(branches, starts, strict=True):
        assert seq.token_slice(len(start), seq.num_tokens) == generate(start, 9)
