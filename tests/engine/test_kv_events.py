"""What a worker tells of its prefix cache is what lookups find, after every step."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, make_seq
from support.kv_reader import KvReader, split
from tidemill.protocol.prefix import hash_blocks, routing_key
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory import routing_index
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.routing_index import RoutingIndex
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler


class Bench:
    """An engine, everything that ever ran on it, and a reader of its events."""

    def __init__(self, num_blocks: int = 64, block_size: int = 2, *, budget: int = 64) -> None:
        config = StepConfig(
            max_model_len=num_blocks * block_size, max_num_seqs=8, max_num_batched_tokens=budget
        )
        self.blocks = BlockManager(num_blocks, block_size, watermark=0.0)
        self.scheduler = StepScheduler(config, self.blocks)
        self.runner = FakeRunner(num_blocks, block_size)
        self.engine = Engine(self.runner, FakeSampler(), self.scheduler, make_processor)
        self.seqs: list[Sequence] = []
        self.reader = KvReader()

    def add(self, prompt: list[int], num_tokens: int = 1, salt: str | None = None) -> Sequence:
        seq = make_seq(prompt, num_tokens, salt=salt)
        self.engine.add(seq)
        self.seqs.append(seq)
        return seq

    def step(self) -> None:
        try:
            self.engine.step()
        except RuntimeError:
            assert len(self.runner.plans) in self.runner.fail_before | self.runner.fail_after

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def read(self) -> None:
        events = self.blocks.collect_events()
        if events is not None:
            self.reader.apply(events)

    def findable(self) -> set[bytes]:
        """Hash everything that ever ran and look each block up."""
        found = set()
        for seq in self.seqs:
            tokens = [*seq.prompt_ids, *seq.output_ids]
            hashes = hash_blocks(tokens, self.blocks.block_size, seq.extra_keys)
            for digest, block_hash in zip(split(routing_key(hashes)), hashes[3::4], strict=True):
                if self.blocks._pool.find(block_hash) is not None:
                    found.add(digest)
        return found


def make_processor(seq: Sequence) -> FakeProcessor:
    return FakeProcessor(seq.params.max_tokens or 1)


def test_a_computed_prompt_is_told_by_every_fourth_block() -> None:
    bench = Bench()
    seq = bench.add(list(range(19)))
    bench.step()
    events = bench.blocks.collect_events()
    assert events is not None
    assert (events.seq, events.evicted) == (1, b"")
    assert set(split(events.stored)) == set(split(routing_key(hash_blocks(seq.prompt_ids, 2))))
    assert bench.blocks.collect_events() is None


def test_output_tokens_are_told_when_they_fill_a_routing_block() -> None:
    bench = Bench()
    bench.add(list(range(6)), num_tokens=4)
    for step in range(4):
        bench.step()
        bench.read()
        # The fourth block ends with the second token of the output, which the third step computes.
        assert len(bench.reader.digests) == (1 if step >= 2 else 0)


def test_a_step_that_fails_is_told_nothing_of() -> None:
    bench = Bench()
    bench.runner.fail_after = {1}
    bench.add(list(range(16)))
    bench.step()
    assert bench.blocks.collect_events() is None
    bench.step()
    bench.read()
    assert len(bench.reader.digests) == 2


def test_events_cannot_be_collected_within_a_step() -> None:
    bench = Bench()
    bench.add(list(range(16)))
    bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="between steps"):
        bench.blocks.collect_events()


def test_an_evicted_prefix_is_told_and_one_that_came_and_went_is_not() -> None:
    bench = Bench(num_blocks=8)
    bench.add([1] * 8)
    bench.run()
    bench.read()
    bench.add([2] * 8)
    bench.run()
    bench.add([3] * 14)
    bench.run()
    bench.read()
    assert bench.reader.digests == bench.findable()
    assert bench.reader.seq == 2


def test_a_second_copy_of_a_block_is_no_news() -> None:
    index, pool = RoutingIndex(), BlockManager(8, 2)._pool
    pool.routing = index
    pool.take(2)
    pool.publish(0, bytes(32), is_routing=True)
    pool.publish(1, bytes(32), is_routing=True)
    assert index.collect() is not None
    pool.unpublish(0)
    assert index.collect() is None
    pool.unpublish(1)
    events = index.collect()
    assert events is not None
    assert events.evicted == bytes(8)


def test_many_changes_are_told_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_index, "MAX_BATCH_HASHES", 10)
    index, reader = RoutingIndex(), KvReader()
    hashes = [number.to_bytes(32, "little") for number in range(25)]
    for block_hash in hashes:
        index.add(block_hash)
    while (events := index.collect()) is not None:
        reader.apply(events)
    assert reader.seq == 3
    assert reader.digests == {block_hash[:8] for block_hash in hashes}


def test_a_snapshot_is_what_the_batches_told() -> None:
    bench = Bench(num_blocks=16)
    assert (bench.blocks.snapshot().seq, bench.blocks.snapshot().digests) == (0, b"")
    for number in range(6):
        bench.add([number] * 16)
        bench.run()
        bench.read()
        # What the next batch will tell of is not in it.
        bench.add([number, *range(7, 16)])
        bench.run()
        snapshot = bench.blocks.snapshot()
        assert snapshot.seq == bench.reader.seq
        assert set(split(snapshot.digests)) == bench.reader.digests


@dataclass(frozen=True)
class Arrival:
    """A prompt, the length of its output, and the steps in which it comes and perhaps goes."""

    prompt: list[int]
    num_tokens: int
    salt: str | None
    arrives: int
    leaves: int | None


ARRIVALS = st.builds(
    Arrival,
    prompt=st.builds(
        lambda head, tail: [*head, *tail],
        st.sampled_from([[], [0] * 9, [0] * 18, [0, 1] * 9]),
        st.lists(st.integers(0, 1), min_size=1, max_size=12),
    ),
    num_tokens=st.integers(1, 12),
    salt=st.sampled_from([None, None, "a"]),
    arrives=st.integers(0, 12),
    leaves=st.one_of(st.none(), st.none(), st.integers(1, 15)),
)
FAILURES = st.sets(st.integers(1, 25), max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, max_size=10),
    num_blocks=st.integers(45, 60),
    block_size=st.integers(1, 3),
    budget=st.integers(8, 40),
    before=FAILURES,
    after=FAILURES,
    pauses=st.sets(st.integers(0, 40)),
)
def test_the_replayed_events_are_what_lookups_find(
    arrivals: list[Arrival],
    num_blocks: int,
    block_size: int,
    budget: int,
    before: set[int],
    after: set[int],
    pauses: set[int],
) -> None:
    bench = Bench(num_blocks, block_size, budget=budget)
    bench.runner.fail_before, bench.runner.fail_after = before, after
    came: dict[int, Sequence] = {}
    for number in range(400):
        for index, arrival in enumerate(arrivals):
            if arrival.arrives == number:
                came[index] = bench.add(arrival.prompt, arrival.num_tokens, arrival.salt)
            if arrival.leaves == number and index in came:
                bench.engine.abort(came[index].seq_id)
        bench.step()
        if number not in pauses:
            bench.read()
            assert bench.reader.digests == bench.findable()
        if number > 12 and not bench.engine.has_work:
            break
    bench.read()
    assert bench.reader.digests == bench.findable()
    assert set(split(bench.blocks.snapshot().digests)) == bench.reader.digests
