"""Ten thousand requests through step scheduler and block manager, with cancels and preemptions."""

import gc
import random
from pathlib import Path

import pytest

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, generate, make_seq
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

NUM_REQUESTS = 10_000
NUM_BLOCKS = 60
#: What the process may grow by after a fifth of the requests: fragmentation, not a leak.
MAX_GROWTH_BYTES = 16 << 20


def resident_bytes() -> int:
    """The resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Soak:
    """Requests that come at random, some of which are cancelled."""

    def __init__(self) -> None:
        self.chance = random.Random(1)
        self.blocks = BlockManager(NUM_BLOCKS, 4, num_swap_blocks=40, swap_on_preemption=True)
        config = StepConfig(max_model_len=120, max_num_seqs=12, max_num_batched_tokens=48)
        self.scheduler = StepScheduler(config, self.blocks)
        self.runner = FakeRunner(NUM_BLOCKS, 4)
        self.engine = Engine(self.runner, FakeSampler(), self.scheduler, self.make_processor)
        self.wanted: dict[str, int] = {}
        self.live: dict[str, Sequence] = {}
        self.num_added = self.num_cancelled = self.num_copied = 0

    def make_processor(self, seq: Sequence) -> FakeProcessor:
        return FakeProcessor(self.wanted[seq.seq_id])

    def run(self) -> None:
        resident = 0
        while self.num_added < NUM_REQUESTS or self.engine.has_work:
            while self.num_added < NUM_REQUESTS and len(self.live) < 20:
                self.add()
            if self.chance.random() < 0.1:
                self.cancel()
            self.step()
            if not resident and self.num_added > NUM_REQUESTS // 5:
                gc.collect()
                resident = resident_bytes()
        gc.collect()
        assert resident_bytes() - resident < MAX_GROWTH_BYTES

    def add(self) -> None:
        template = [self.chance.randrange(8)] * self.chance.choice([0, 8, 24])
        prompt = [
            *template,
            *(self.chance.randrange(100) for _ in range(self.chance.randint(1, 30))),
        ]
        seq = make_seq(prompt, 40, priority=self.chance.choice([-1, 0, 0, 1, 1]))
        self.wanted[seq.seq_id] = self.chance.randint(1, 40)
        self.live[seq.seq_id] = seq
        self.engine.add(seq)
        self.num_added += 1

    def cancel(self) -> None:
        if self.live:
            seq_id = self.chance.choice(list(self.live))
            assert self.engine.abort(seq_id) is self.live.pop(seq_id)
            del self.wanted[seq_id]
            self.num_cancelled += 1

    def step(self) -> None:
        for output in self.engine.step():
            if output.finish is not None:
                seq = self.live.pop(output.seq.seq_id)
                assert seq.output_ids == generate(seq.prompt_ids, self.wanted.pop(seq.seq_id))
        self.runner.plans.clear()
        use = self.scheduler.kv_use
        held = {block for seq in self.scheduler.running for block in seq.block_table}
        assert len(held) == use.used_blocks
        assert use.used_blocks + self.blocks.num_free_blocks == NUM_BLOCKS
        assert use.most_empty_slots <= 3


@pytest.mark.slow
def test_no_block_and_no_memory_is_lost_in_ten_thousand_requests() -> None:
    soak = Soak()

    soak.run()

    soak.scheduler.check_integrity()
    assert soak.blocks.num_free_blocks == NUM_BLOCKS
    assert soak.num_cancelled > 500
    assert soak.scheduler.num_preemptions > 1000
    assert soak.blocks.num_swapped_in > 1000
    print(
        f"{soak.num_cancelled} cancelled, {soak.scheduler.num_preemptions} preemptions, "
        f"{soak.blocks.num_swapped_in} blocks swapped in, {soak.blocks.num_swapped_out} out"
    )
