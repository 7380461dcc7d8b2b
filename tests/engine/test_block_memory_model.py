"""Any sequence of operations, forks, swaps and windows included, against memory cell by cell."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.fake_engine import make_seq
from support.physical_blocks import History, PhysicalBlocks, history_of
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.places import NO_BLOCK, slot_of

# Few token values, so that prefixes meet often.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class BlockMemoryMachine(RuleBasedStateMachine):
    """Steps that end well or fail, with forks between them; sequences yield, return and leave."""

    @initialize(
        num_blocks=st.integers(3, 10),
        block_size=st.integers(1, 4),
        num_slots=st.sampled_from([12, 3, 1, 0]),
        swaps=st.booleans(),
        window=st.sampled_from([None, None, None, 2, 5]),
    )
    def start(
        self, num_blocks: int, block_size: int, num_slots: int, swaps: bool, window: int | None
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            block_size,
            watermark=0.0,
            num_swap_blocks=num_slots,
            swap_on_preemption=swaps,
            window=window,
        )
        self.memory = PhysicalBlocks(num_blocks, block_size)
        # What lookups may find: full histories by block, and by slot once they were copied there.
        self.findable: dict[int, History] = {}
        self.swapped: dict[int, History] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.scheduled: dict[str, int] = {}
        self.admitted: list[Sequence] = []

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "a"]), chunk=st.integers(1, 14))
    def arrive(self, tokens: list[int], salt: str, chunk: int) -> None:
        self.admit(make_seq(tokens, salt=salt), chunk)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 14))
    def come_back(self, data: st.DataObject, chunk: int) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        if self.admit(seq, chunk):
            self.waiting.remove(seq)

    @precondition(lambda self: not self.scheduled)
    @rule(data=st.data(), prompts=st.lists(TOKENS, min_size=1, max_size=4))
    def steps(self, data: st.DataObject, prompts: list[list[int]]) -> None:
        """Whole steps in which somebody arrives and all go on, yield and come back."""
        for tokens in prompts:
            while self.waiting and self.admit(self.waiting[0], 14):
                self.waiting.pop(0)
            self.admit(make_seq(tokens, salt=""), 14)
            self.all_go_on()
            if self.scheduled:
                self.end_step(data)
            if self.running:
                self.yield_blocks(data)

    def admit(self, seq: Sequence, chunk: int) -> bool:
        prefix = self.manager.find_prefix(seq)
        self.check_prefix(seq, prefix)
        if not self.manager.can_admit(seq, prefix):
            return False
        self.manager.adopt_prefix(seq, prefix)
        for index, block in enumerate(seq.block_table):
            if slot_of(prefix[index]) is not None:
                self.findable[block] = self.full_history(seq, index)
        seq.num_computed_tokens = len(prefix) * self.manager.block_size
        self.running.append(seq)
        self.admitted.append(seq)
        assert self.extend(seq, min(chunk, seq.num_uncomputed_tokens))
        return True

    @precondition(lambda self: self.unscheduled())
    @rule(data=st.data(), chunk=st.integers(1, 14))
    def go_on(self, data: st.DataObject, chunk: int) -> None:
        seq = data.draw(st.sampled_from(self.unscheduled()))
        self.extend(seq, min(chunk, seq.num_uncomputed_tokens))

    @precondition(lambda self: self.unscheduled())
    @rule()
    def all_go_on(self) -> None:
        for seq in self.unscheduled():
            self.extend(seq, 1)

    @precondition(lambda self: self.running and not self.scheduled)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def fork(self, data: st.DataObject, tokens: list[int]) -> None:
        parent = data.draw(st.sampled_from(self.running))
        salt = parent.extra_keys[0][1] if parent.extra_keys else ""
        known = parent.token_slice(0, parent.num_computed_tokens)
        for token in tokens:
            child = make_seq([*known, token], salt=salt)
            self.manager.fork(parent, child)
            self.running.append(child)
        # What is written to before the parent goes on is copied.
        self.all_go_on()

    # Once somebody was admitted, a step takes nobody out any more: there may be followers.
    @precondition(lambda self: self.running and not self.admitted)
    @rule(data=st.data())
    def yield_blocks(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        before = self.scheduled.get(seq.seq_id, seq.num_computed_tokens)
        self.withdraw(seq, before)
        self.manager.preempt(seq)
        seq.num_computed_tokens = 0
        self.waiting.append(seq)

    @precondition(lambda self: self.running and not self.admitted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.withdraw(seq, self.scheduled.get(seq.seq_id, seq.num_computed_tokens))
        self.manager.free(seq)

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        copies = self.manager.copies
        self.swapped.update(self.pending_outs())
        self.memory.copy(copies)
        for seq in self.running:
            if seq.seq_id in self.scheduled:
                self.memory.write(seq, self.scheduled[seq.seq_id], seq.num_computed_tokens)
        self.manager.commit_step()
        for seq in self.running:
            if seq.seq_id in self.scheduled and not seq.num_uncomputed_tokens:
                seq.output_ids.append(data.draw(st.integers(0, 1)))
        self.scheduled, self.admitted = {}, []
        self.check_memory()

    @precondition(lambda self: self.scheduled)
    @rule()
    def fail_step(self) -> None:
        for copy in self.manager.copies.outs:
            self.swapped.pop(copy.target, None)
        self.memory.spoil(self.manager.copies)
        for seq in self.running:
            start = self.scheduled.get(seq.seq_id, seq.num_computed_tokens)
            self.memory.write(seq, start, seq.num_computed_tokens, spoils=True)
            self.unpublish(seq, start)
            seq.num_computed_tokens = start
        for copy in self.manager.copies.ins:
            self.findable.pop(copy.target, None)
        self.manager.rollback_step()
        for seq in self.admitted:
            self.running.remove(seq)
            self.manager.free(seq)
        self.scheduled, self.admitted = {}, []
        self.check_memory()

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        self.manager.check_integrity(self.running)
        used = {block for seq in self.running for block in seq.block_table} - {NO_BLOCK}
        used |= {copy.source for copy in self.manager.copies.forks}
        assert len(used) + self.manager.num_free_blocks == self.manager.num_blocks

    @invariant()
    def nobody_writes_where_another_one_reads(self) -> None:
        size = self.manager.block_size
        for seq in [seq for seq in self.running if seq.seq_id in self.scheduled]:
            start = self.scheduled[seq.seq_id]
            for block in seq.block_table[start // size : -(-seq.num_computed_tokens // size)]:
                others = [o for o in self.running if o is not seq and o not in self.admitted]
                assert not any(block in other.block_table for other in others)

    def check_memory(self) -> None:
        for seq in self.running:
            self.memory.check(seq, seq.num_computed_tokens, self.manager.window)
        for block, history in self.findable.items():
            assert self.memory.blocks[block][-1] == history
        for slot, history in self.swapped.items():
            assert self.memory.slots[slot][-1] == history

    def check_prefix(self, seq: Sequence, prefix: list[int]) -> None:
        """The prefix is the longest one that can be found, and is what it claims to be."""
        swapped = self.swapped | self.pending_outs()
        for index, place in enumerate(prefix):
            slot = slot_of(place)
            if place != NO_BLOCK:
                found = self.findable[place] if slot is None else swapped[slot]
                assert found == self.full_history(seq, index)
        here = {*self.findable.values(), *swapped.values()}
        assert len(prefix) == self.longest(seq, here)

    def longest(self, seq: Sequence, here: set[History]) -> int:
        size, window = self.manager.block_size, self.manager.window
        limit = (seq.num_tokens - 1) // size
        for count in range(limit, 0, -1):
            first = 0 if window is None else max(0, count * size - window + 1) // size
            if all(self.full_history(seq, index) in here for index in range(first, count)):
                return count
        return 0

    def unscheduled(self) -> list[Sequence]:
        return [
            seq
            for seq in self.running
            if seq.seq_id not in self.scheduled and seq.num_uncomputed_tokens
        ]

    def extend(self, seq: Sequence, count: int) -> bool:
        size = self.manager.block_size
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        before = list(enumerate(seq.block_table))
        allocated = self.manager.allocate(seq, count)
        # By place: a block that left the window may come back as the next one.
        for _, block in set(enumerate(seq.block_table)) - set(before):
            self.findable.pop(block, None)
        if allocated:
            self.scheduled[seq.seq_id] = start
            seq.num_computed_tokens = end
            for index in range(start // size, end // size):
                self.findable[seq.block_table[index]] = self.full_history(seq, index)
        return allocated

    def withdraw(self, seq: Sequence, start: int) -> None:
        self.unpublish(seq, start)
        self.running.remove(seq)
        self.scheduled.pop(seq.seq_id, None)

    def unpublish(self, seq: Sequence, start: int) -> None:
        size = self.manager.block_size
        for index in range(start // size, seq.num_computed_tokens // size):
            self.findable.pop(seq.block_table[index], None)

    def pending_outs(self) -> dict[int, History]:
        """What the copies of this step will have brought to the CPU tier; all of it was full."""
        pending = {}
        for copy in self.manager.copies.outs:
            content = self.memory.blocks[copy.source][-1]
            assert content is not None
            pending[copy.target] = content
        return pending

    def full_history(self, seq: Sequence, index: int) -> History:
        return history_of(seq, (index + 1) * self.manager.block_size)


BlockMemoryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestBlockManagerAgainstMemory = BlockMemoryMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_for_longer() -> None:
    longer = settings(max_examples=1000, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(BlockMemoryMachine, settings=longer)
