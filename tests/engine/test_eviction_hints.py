"""Prefixes that waiting jobs will use are evicted last, heads after tails, and never for ever."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.fake_engine import make_seq
from tidemill.protocol.prefix import hash_blocks, routing_key
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory import hints as hints_module
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.hints import Hints

NUM_BLOCKS = 16
#: Two blocks of one token more than a routing hash.
HINTED = [7] * 6


def run_once(blocks: BlockManager, prompt: list[int]) -> Sequence:
    """Compute a prompt and leave its blocks to the cache."""
    seq = admit(blocks, prompt)
    blocks.commit_step()
    blocks.free(seq)
    return seq


def admit(blocks: BlockManager, prompt: list[int], priority: int = 0) -> Sequence:
    seq = make_seq(prompt, priority=priority)
    prefix = blocks.find_prefix(seq)
    assert blocks.can_admit(seq, prefix)
    blocks.adopt_prefix(seq, prefix)
    seq.num_computed_tokens = len(prefix) * blocks.block_size
    assert blocks.allocate(seq, seq.num_uncomputed_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return seq


def digest(prompt: list[int]) -> bytes:
    """The deepest routing hash of a prompt, with blocks of one token."""
    return routing_key(hash_blocks(prompt, 1))[-8:]


def num_cached(blocks: BlockManager, prompt: list[int]) -> int:
    return len(blocks.find_prefix(make_seq([*prompt, 999])))


def flood(blocks: BlockManager, count: int, start: int = 1000) -> None:
    """Compute ``count`` prompts of four blocks that nobody hinted."""
    for number in range(start, start + count):
        run_once(blocks, [number] * 4)
        blocks.check_integrity([])


def test_without_a_hint_the_oldest_prefix_goes() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, HINTED)
    flood(blocks, 4)
    assert num_cached(blocks, HINTED) == 0


def test_a_hinted_prefix_survives_what_nobody_waits_for() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, HINTED)
    blocks.hint({digest(HINTED): 5})
    flood(blocks, 4)
    # The first four blocks lead to the routing hash; what is behind it was not hinted.
    assert num_cached(blocks, HINTED) == 4


def test_a_hint_holds_for_a_prefix_that_is_computed_later() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    blocks.hint({digest(HINTED): 5})
    run_once(blocks, HINTED)
    flood(blocks, 4)
    assert num_cached(blocks, HINTED) == 4


def test_a_hint_for_a_deep_prefix_keeps_its_head_although_others_released_it_later() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    deep = [7] * 8
    run_once(blocks, deep)
    blocks.hint({digest(deep): 1})
    run_once(blocks, [7, 7, 1])
    flood(blocks, 4)
    assert num_cached(blocks, deep) == 8


def test_a_dropped_hint_leaves_a_prefix_to_the_usual_order() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, HINTED)
    blocks.hint({digest(HINTED): 5})
    flood(blocks, 2)
    blocks.hint({digest(HINTED): 0})
    flood(blocks, 4, start=2000)
    assert num_cached(blocks, HINTED) == 0


def test_two_hinted_chains_share_their_head_until_both_are_dropped() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    short, left, right = [7] * 4, [7] * 4 + [1] * 4, [7] * 4 + [2] * 4
    run_once(blocks, left)
    run_once(blocks, right)
    blocks.hint({digest(left): 1, digest(right): 1, digest(short): 2})
    blocks.hint({digest(left): 0})
    flood(blocks, 3)
    assert (num_cached(blocks, left), num_cached(blocks, right)) == (4, 8)
    blocks.hint({digest(right): 0})
    flood(blocks, 3, start=2000)
    assert num_cached(blocks, right) == 4
    blocks.hint({digest(short): 0})
    flood(blocks, 4, start=3000)
    assert num_cached(blocks, right) == 0


def test_hinted_blocks_are_taken_when_nothing_else_is_left() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    left, right = [7] * 4 + [1] * 4, [7] * 4 + [2] * 4
    for prompt in (left, right):
        run_once(blocks, prompt)
        blocks.hint({digest(prompt): 3})
    assert blocks.num_free_blocks == NUM_BLOCKS
    # Four blocks are free of content, so six of the kept ones must go, tails first.
    seq = admit(blocks, list(range(100, 110)))
    assert num_cached(blocks, left) == 4
    assert num_cached(blocks, right) == 6
    blocks.commit_step()
    blocks.check_integrity([seq])


def test_a_kept_copy_whose_chain_goes_on_in_blocks_in_use_can_be_taken() -> None:
    blocks = BlockManager(8, 1)
    # Two sequences compute the same chain side by side: neither finds the other's blocks.
    first, second = make_seq([7] * 4), make_seq([7] * 4)
    for seq in (first, second):
        assert blocks.allocate(seq, 4)
        seq.num_computed_tokens = 4
    blocks.commit_step()
    blocks.hint({digest([7] * 4): 1})
    blocks.free(first)
    third = admit(blocks, [1, 2, 3, 4])
    blocks.commit_step()
    assert num_cached(blocks, [7] * 4) == 4
    blocks.check_integrity([second, third])


def test_a_hint_that_nobody_repeats_lapses_when_the_cache_was_turned_over_often() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, HINTED)
    blocks.hint({digest(HINTED): 5})
    flood(blocks, 16)
    assert num_cached(blocks, HINTED) == 4
    flood(blocks, 5, start=2000)
    assert num_cached(blocks, HINTED) == 0


def test_a_hint_of_something_unknown_changes_nothing() -> None:
    blocks = BlockManager(NUM_BLOCKS, 1)
    run_once(blocks, HINTED)
    before = blocks.free_blocks
    blocks.hint({b"?" * 8: 4, b"!" * 8: 0})
    assert blocks.free_blocks == before


def test_the_oldest_of_too_many_hints_is_forgotten() -> None:
    hints = Hints(lifetime=10**9)
    digests = [number.to_bytes(8, "big") for number in range(hints_module.MAX_HINTS)]
    assert [hints.note(each, 0) for each in digests] == [None] * len(digests)
    assert hints.note(digests[0], 1) is None
    assert hints.note(b"new-hint", 1) == digests[1]
    assert digests[0] in hints
    assert digests[1] not in hints


# Few values, so that chains meet often, and long enough for two routing hashes.
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=9)


class HintMachine(RuleBasedStateMachine):
    """Sequences of all classes come and go while prefixes are hinted and dropped."""

    @initialize(num_blocks=st.integers(10, 20))
    def start(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, 1, watermark=0.0)
        self.held: list[Sequence] = []
        self.prompts: list[list[int]] = []

    @rule(prompt=PROMPTS, priority=st.integers(-1, 1))
    def come(self, prompt: list[int], priority: int) -> None:
        seq = make_seq(prompt)
        prefix = self.blocks.find_prefix(seq)
        fits = self.blocks.num_blocks_for(seq.num_tokens) - len(prefix)
        reused = sum(self.blocks._pool.is_free(block) for block in prefix)
        assert self.blocks.can_admit(seq, prefix) == (fits + reused <= self.blocks.num_free_blocks)
        if self.blocks.can_admit(seq, prefix):
            self.held.append(admit(self.blocks, prompt, priority))
            self.blocks.commit_step()
            self.prompts.append(prompt)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.held))
        self.held.remove(seq)
        self.blocks.free(seq)

    @rule(prompt=PROMPTS, refs=st.integers(0, 2))
    def hint(self, prompt: list[int], refs: int) -> None:
        key = routing_key(hash_blocks(prompt, 1))
        self.blocks.hint({key[start : start + 8]: refs for start in range(0, len(key), 8)})

    @invariant()
    def all_is_well(self) -> None:
        self.blocks.check_integrity(self.held)

    @invariant()
    def no_prefix_loses_its_head(self) -> None:
        find = self.blocks._pool.find
        for prompt in self.prompts:
            found = [find(block_hash) is not None for block_hash in hash_blocks(prompt, 1)]
            assert found == sorted(found, reverse=True)

    @invariant()
    def every_free_block_can_be_taken(self) -> None:
        free = self.blocks.free_blocks
        assert len(set(free)) == self.blocks.num_free_blocks


HintMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHintsUnderAnyLoad = HintMachine.TestCase
