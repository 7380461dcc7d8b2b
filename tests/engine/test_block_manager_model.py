"""Any sequence of operations: the block manager against a naive one without hashes and counts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.fake_engine import make_seq
from support.naive_blocks import NaiveBlocks
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager

# Few token values, so that prefixes meet often.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
SALTS = st.sampled_from(["", "a"])
PRIORITIES = st.integers(-1, 1)


class BlockManagerMachine(RuleBasedStateMachine):
    """Steps of admissions, chunks and decodes that end well or fail, and sequences that leave."""

    @initialize(
        num_blocks=st.integers(1, 10), block_size=st.integers(1, 4), waiting=st.lists(TOKENS)
    )
    def start(self, num_blocks: int, block_size: int, waiting: list[list[int]]) -> None:
        self.manager = BlockManager(num_blocks, block_size, watermark=0.0)
        self.naive = NaiveBlocks(num_blocks, block_size)
        self.seqs: list[Sequence] = []
        self.waiting = [make_seq(tokens, salt="") for tokens in waiting]
        # Position each sequence had before the current step; admitted ones may be followers.
        self.scheduled: dict[str, int] = {}
        self.admitted: list[Sequence] = []

    @rule(tokens=TOKENS, salt=SALTS, chunk=st.integers(1, 12), priority=PRIORITIES)
    def admit(self, tokens: list[int], salt: str, chunk: int, priority: int) -> None:
        seq = make_seq(tokens, salt=salt, priority=priority)
        prefix = self.manager.find_prefix(seq)
        assert prefix == self.naive.longest_prefix(salt, tokens)
        if not self.manager.can_admit(seq, prefix):
            return
        self.manager.adopt_prefix(seq, prefix)
        self.naive.hold(seq.seq_id, prefix)
        seq.num_computed_tokens = len(prefix) * self.manager.block_size
        self.seqs.append(seq)
        self.admitted.append(seq)
        assert self.extend(seq, min(chunk, seq.num_uncomputed_tokens))

    @precondition(lambda self: self.unscheduled())
    @rule(data=st.data(), chunk=st.integers(1, 12))
    def continue_one(self, data: st.DataObject, chunk: int) -> None:
        seq = data.draw(st.sampled_from(self.unscheduled()))
        self.extend(seq, min(chunk, seq.num_uncomputed_tokens))

    # Once somebody was admitted, a step takes nobody out any more: there may be followers.
    @precondition(lambda self: self.seqs and not self.admitted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.seqs)))

    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        self.manager.commit_step()
        self.naive.step_ended()
        for seq in self.seqs:
            if seq.seq_id in self.scheduled and not seq.num_uncomputed_tokens:
                seq.output_ids.append(data.draw(st.integers(0, 1)))
        self.scheduled, self.admitted = {}, []

    @rule()
    def fail_step(self) -> None:
        self.manager.rollback_step()
        self.naive.step_failed()
        for seq in self.seqs:
            seq.num_computed_tokens = self.scheduled.get(seq.seq_id, seq.num_computed_tokens)
        for seq in self.admitted:
            self.drop(seq)
        self.scheduled, self.admitted = {}, []

    @invariant()
    def both_agree(self) -> None:
        self.manager.check_integrity(self.seqs)
        assert list(self.manager.free_blocks) == self.naive.free_list
        for seq in self.seqs:
            assert seq.block_table == self.naive.tables.get(seq.seq_id, [])

    @invariant()
    def a_count_that_goes_on_from_the_last_one_is_exact(self) -> None:
        for seq in (*self.waiting, *self.seqs):
            assert self.manager.count_prefix(seq) == len(self.manager.find_prefix(seq))

    def unscheduled(self) -> list[Sequence]:
        return [
            seq
            for seq in self.seqs
            if seq.seq_id not in self.scheduled and seq.num_uncomputed_tokens
        ]

    def extend(self, seq: Sequence, count: int) -> bool:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        salt = seq.extra_keys[0][1] if seq.extra_keys else ""
        tokens = seq.token_slice(0, seq.num_tokens)
        allocated = self.manager.allocate(seq, count)
        assert allocated == self.naive.extend(seq.seq_id, salt, tokens, start, end)
        if allocated:
            self.scheduled[seq.seq_id] = start
            seq.num_computed_tokens = end
        return allocated

    def drop(self, seq: Sequence) -> None:
        self.manager.free(seq)
        self.naive.drop(seq.seq_id, is_batch=seq.priority > 0)
        self.seqs.remove(seq)


BlockManagerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestBlockManagerAgainstTheNaiveOne = BlockManagerMachine.TestCase
