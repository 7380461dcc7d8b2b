"""A shared prefix is computed once: followers wait for its leader or hit it in the same step."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_engine import make_seq
from tidemill_gpuworker.engine.sequence import Sequence, SequenceStatus
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

SIZE = 4


class Bench:
    """A scheduler, and a record of each full block that a step which worked has computed."""

    def __init__(self, *, budget: int = 16, threshold: int = 0, num_blocks: int = 256) -> None:
        config = StepConfig(
            max_model_len=512,
            max_num_seqs=min(16, budget),
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
        )
        self.scheduler = StepScheduler(config, BlockManager(num_blocks, SIZE, watermark=0.0))
        self.computed: list[tuple[int, ...]] = []
        self.num_tokens = 0

    def add(self, prompt: list[int], priority: int = 0) -> Sequence:
        seq = make_seq(prompt, 4, priority=priority)
        self.scheduler.add(seq)
        return seq

    def step(self, *, fails: bool = False) -> StepPlan:
        plan = self.scheduler.schedule()
        if fails:
            self.scheduler.fail(plan)
        elif plan.scheduled:
            self._record(plan)
            self.scheduler.update(plan, [(7,)] * len(plan.sampling))
        self.scheduler.check_integrity()
        return plan

    def run(self) -> None:
        """Run until all prompts are computed; a sequence ends with its first token."""
        for _ in range(500):
            for seq in list(self.scheduler.running):
                if seq.output_ids:
                    self.scheduler.finish(seq)
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("somebody waits for ever")

    def _record(self, plan: StepPlan) -> None:
        for item in plan.scheduled:
            self.num_tokens += item.num_tokens
            for end in range(item.start // SIZE * SIZE + SIZE, item.end + 1, SIZE):
                self.computed.append(tuple(item.seq.token_slice(0, end)))

    def check_nothing_was_computed_twice(self) -> None:
        assert len(self.computed) == len(set(self.computed))


def shape(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Sequence id -> start and number of tokens."""
    return {item.seq.seq_id: (item.start, item.num_tokens) for item in plan.scheduled}


def own(number: int, length: int) -> list[int]:
    """Tokens that nothing else begins with."""
    return [1000 * number + position for position in range(length)]


def test_followers_of_a_leader_in_chunks_come_in_with_the_step_that_completes_the_prefix() -> None:
    bench = Bench(budget=24, threshold=8)
    shared = own(1, 24)
    leader = bench.add([*shared, 1])
    followers = [bench.add([*shared, 2, number]) for number in range(3)]
    assert shape(bench.step()) == {leader.seq_id: (0, 8)}
    assert shape(bench.step()) == {leader.seq_id: (8, 8)}
    assert [seq.status for seq in followers] == [SequenceStatus.WAITING] * 3
    third = shape(bench.step())
    assert third.pop(leader.seq_id) == (16, 8)
    assert third == {seq.seq_id: (24, 2) for seq in followers}
    assert [seq.num_cached_tokens for seq in followers] == [24] * 3
    bench.run()
    bench.check_nothing_was_computed_twice()
    assert bench.num_tokens == 24 + 1 + 3 * 2


def test_while_followers_wait_strangers_use_the_room() -> None:
    bench = Bench(budget=16, threshold=8)
    shared = own(1, 24)
    leader, follower = bench.add([*shared, 1]), bench.add([*shared, 2])
    stranger = bench.add(own(5, 6))
    assert shape(bench.step()) == {leader.seq_id: (0, 8), stranger.seq_id: (0, 6)}
    assert follower.status is SequenceStatus.WAITING


def test_two_leaders_each_lead_their_own() -> None:
    bench = Bench(budget=32, threshold=8)
    left, right = own(1, 16), own(2, 16)
    leaders = [bench.add([*left, 1]), bench.add([*right, 1])]
    followers = [bench.add([*(left, right)[n % 2], 2, n]) for n in range(4)]
    assert shape(bench.step()) == {seq.seq_id: (0, 8) for seq in leaders}
    assert shape(bench.step()) == {
        **{seq.seq_id: (8, 8) for seq in leaders},
        **{seq.seq_id: (16, 2) for seq in followers},
    }
    bench.run()
    bench.check_nothing_was_computed_twice()
    assert bench.num_tokens == 2 * 16 + 2 * 1 + 4 * 2


def test_a_follower_that_branches_off_leads_those_that_share_more_with_it() -> None:
    bench = Bench(budget=40, threshold=8)
    trunk, branch = own(1, 8), own(2, 16)
    leader = bench.add([*trunk, *own(3, 16)])
    second = bench.add([*trunk, *branch, 1])
    third = bench.add([*trunk, *branch, 2])
    assert shape(bench.step()) == {leader.seq_id: (0, 8), second.seq_id: (8, 8)}
    assert shape(bench.step()) == {
        leader.seq_id: (8, 8),
        second.seq_id: (16, 8),
        third.seq_id: (24, 1),
    }
    bench.run()
    bench.check_nothing_was_computed_twice()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_if_a_leader_goes_in_mid_prefill_the_next_one_goes_on_from_its_frontier(
    num_steps: int,
) -> None:
    bench = Bench(budget=8)
    shared = own(1, 32)
    leader = bench.add([*shared, 1])
    heirs = [bench.add([*shared, 2, number]) for number in range(3)]
    for _ in range(num_steps):
        bench.step()
    assert bench.scheduler.abort(leader.seq_id) is leader
    assert shape(bench.step()) == {heirs[0].seq_id: (8 * num_steps, 8)}
    # The others wait for the new leader as they did for the old one.
    assert [seq.status for seq in heirs[1:]] == [SequenceStatus.WAITING] * 2
    bench.run()
    bench.check_nothing_was_computed_twice()
    assert bench.num_tokens == 32 + 3 * 2


def test_of_a_leader_that_goes_within_a_block_only_that_block_is_computed_again() -> None:
    bench = Bench(budget=10)
    shared = own(1, 32)
    leader = bench.add([*shared, 1])
    heir = bench.add([*shared, 2])
    bench.step()
    bench.scheduler.abort(leader.seq_id)
    assert shape(bench.step()) == {heir.seq_id: (8, 10)}
    bench.run()
    bench.check_nothing_was_computed_twice()
    assert bench.num_tokens == 32 + 1 + 2


def test_a_failed_step_hides_what_it_was_to_compute_from_all_followers() -> None:
    bench = Bench(budget=64, threshold=16)
    shared = own(1, 32)
    bench.add([*shared, 1])
    followers = [bench.add([*shared, 2, number]) for number in range(3)]
    bench.step()
    bench.step(fails=True)
    blocks = bench.scheduler.block_manager
    assert [len(blocks.find_prefix(seq)) for seq in followers] == [4] * 3
    bench.run()
    bench.check_nothing_was_computed_twice()
    assert bench.num_tokens == 32 + 1 + 3 * 2


def test_an_interactive_follower_lends_its_urgency_to_the_leader_it_waits_for() -> None:
    bench = Bench(budget=8)
    shared = own(1, 24)
    leader = bench.add([*shared, 1], priority=5)
    bench.step()
    stranger = bench.add(own(9, 40))
    follower = bench.add([*shared, 2], priority=-1)
    # Without a follower above it, the stranger would come before the leader.
    assert shape(bench.step()) == {leader.seq_id: (8, 8)}
    assert stranger.status is SequenceStatus.WAITING
    bench.step()
    assert shape(bench.step())[follower.seq_id] == (24, 1)
    bench.check_nothing_was_computed_twice()


@dataclass(frozen=True)
class Arrival:
    """A prompt by its path through a tree of shared parts, and when it comes and perhaps goes."""

    path: tuple[int, ...]
    tail: int
    priority: int
    arrives: int
    leaves: int | None


ARRIVALS = st.builds(
    Arrival,
    path=st.lists(st.integers(0, 1), max_size=4).map(tuple),
    tail=st.integers(1, 6),
    priority=st.sampled_from([-1, 0, 0, 1]),
    arrives=st.integers(0, 8),
    leaves=st.one_of(st.none(), st.none(), st.integers(1, 12)),
)


def prompt_of(arrival: Arrival, number: int) -> list[int]:
    """Seven tokens for each part of the path, so that parts end within blocks, and a tail."""
    shared = [part * 10 + position for part in arrival.path for position in range(7)]
    return [*shared, *own(5 + number, arrival.tail)]


@settings(max_examples=250, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=12),
    budget=st.integers(16, 48),
    threshold=st.sampled_from([0, 0, 3, 5, 8]),
    failures=st.sets(st.integers(0, 20), max_size=4),
)
def test_whoever_comes_goes_or_fails_no_full_block_is_computed_twice(
    arrivals: list[Arrival], budget: int, threshold: int, failures: set[int]
) -> None:
    bench = Bench(budget=budget, threshold=threshold)
    prompts = [prompt_of(arrival, number) for number, arrival in enumerate(arrivals)]
    seqs: dict[int, Sequence] = {}
    for number in range(14):
        for index, arrival in enumerate(arrivals):
            if arrival.arrives == number:
                seqs[index] = bench.add(prompts[index], arrival.priority)
            if arrival.leaves == number and index in seqs:
                bench.scheduler.abort(seqs[index].seq_id)
        bench.step(fails=number in failures and bench.scheduler.has_work)
    bench.run()
    bench.check_nothing_was_computed_twice()


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=12),
    num_blocks=st.integers(14, 24),
    budget=st.integers(16, 40),
)
def test_short_of_blocks_everybody_still_gets_through(
    arrivals: list[Arrival], num_blocks: int, budget: int
) -> None:
    bench = Bench(budget=budget, num_blocks=num_blocks)
    seqs = [bench.add(prompt_of(each, n), each.priority) for n, each in enumerate(arrivals)]
    bench.run()
    assert all(seq.output_ids for seq in seqs)
    assert bench.scheduler.block_manager.num_free_blocks == num_blocks
