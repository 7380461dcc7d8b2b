"""Thousands of requests through one engine, with all that can happen to them: what must not leak.

    cd tests && python -m support.engine_soak --requests 10000

Jobs of one output, of several and of beams come at random, some are cancelled, some steps fail, and
the KV cache is too small, so that sequences are preempted all the time.  After every step free and
used blocks make up the cache; every job that ends has said what it says alone.  With ``--tensors``
a small model on torch computes in place of the fake one: then it is memory alone that is held.
"""

import argparse
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from support.fake_engine import FakeProcessor
from support.soak_jobs import SoakJob, draw_job
from support.soak_parts import BLOCK_SIZE, NUM_BLOCKS, Parts, fake_parts, real_parts
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.group_engine import GroupEngine
from tidemill_gpuworker.engine.sequence import Sequence as EngineSequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

MAX_MODEL_LEN = 120
NUM_LIVE = 20
#: Where all sequences and blocks are held against each other, which is slow.
CHECK_EVERY = 50
#: What the process may grow by after a fifth of the requests: fragmentation, not a leak.
MAX_GROWTH_BYTES = 16 << 20
#: So few tokens that guesses often come true.
GUESSED_VOCAB_SIZE = 2
PLAIN_VOCAB_SIZE = 50_000


@dataclass(frozen=True)
class Setting:
    """How preempted sequences get their blocks back, and whether tokens are guessed."""

    swaps: bool
    speculates: bool

    def __str__(self) -> str:
        guesses = "speculation" if self.speculates else "no speculation"
        return f"{'swap' if self.swaps else 'recompute'}, {guesses}"

    @property
    def vocab_size(self) -> int:
        """Tokens that the model can say."""
        return GUESSED_VOCAB_SIZE if self.speculates else PLAIN_VOCAB_SIZE


SETTINGS = [Setting(swaps, speculates) for swaps in (False, True) for speculates in (False, True)]


def resident_bytes() -> int:
    """The resident set of this process, once garbage is collected."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Soak:
    """An engine, the jobs in it, and what it has told of each."""

    def __init__(
        self, setting: Setting, num_requests: int, seed: int = 1, parts: Parts | None = None
    ) -> None:
        parts = parts or fake_parts(setting.vocab_size)
        self.setting = setting
        self.fake = parts.fake
        self.num_requests = num_requests
        self.chance = random.Random(seed)
        self.blocks = BlockManager(
            NUM_BLOCKS,
            BLOCK_SIZE,
            num_swap_blocks=parts.num_swap_blocks,
            swap_on_preemption=setting.swaps,
        )
        config = StepConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=12, max_num_batched_tokens=48)
        self.scheduler = StepScheduler(config, self.blocks, self.make_drafter())
        self.inner = Engine(parts.runner, parts.sampler, self.scheduler, self.make_processor)
        self.engine = GroupEngine(self.inner)
        self.live: dict[str, SoakJob] = {}
        #: Running ones that were in a step that failed: they keep what it allocated, for later use.
        self.failed: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.resident: dict[str, int] = {}

    def make_drafter(self) -> Drafter | None:
        if not self.setting.speculates:
            return None
        config = SpeculativeConfig(
            num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1
        )
        return Drafter(config, MAX_MODEL_LEN)

    def make_processor(self, seq: EngineSequence) -> FakeProcessor:
        return FakeProcessor(seq.params.max_tokens or 1)

    def run(self, on_progress: Callable[[int], None] = lambda num_requests: None) -> None:
        """Take in all requests and run until nothing is left."""
        marks = {0: "start", self.num_requests // 5: "a fifth", self.num_requests // 2: "middle"}
        while self.counts["requests"] < self.num_requests or self.inner.has_work:
            while self.counts["requests"] < self.num_requests and len(self.live) < NUM_LIVE:
                if (mark := marks.get(self.counts["requests"])) is not None:
                    self.resident[mark] = resident_bytes()
                self.add()
            if self.chance.random() < 0.1:
                self.cancel()
            self.step()
            on_progress(self.counts["requests"])
        self.resident["end"] = resident_bytes()
        assert not self.live, "jobs have not ended"
        assert self.blocks.num_free_blocks == NUM_BLOCKS
        self.scheduler.check_integrity()

    def add(self) -> None:
        vocab_size = None if self.fake is None else self.setting.vocab_size
        job = draw_job(self.chance, f"job-{self.counts['requests']}", vocab_size)
        self.live[job.job_id] = job
        self.engine.add(job.work)
        self.counts["requests"] += 1
        self.counts[job.kind] += 1

    def cancel(self) -> None:
        if self.live:
            job = self.live.pop(self.chance.choice(list(self.live)))
            assert self.engine.abort(job.job_id) is job.work
            job.check_told()
            self.counts["cancelled"] += 1

    def step(self) -> None:
        """Run one step, which may fail, and hold the blocks against each other."""
        fails = self.plan_failure()
        try:
            self.take()
        except RuntimeError:
            assert fails, "a step failed that was not to"
            self.counts["failed steps"] += 1
            self.failed |= {seq.seq_id for seq in self.scheduler.running}
        self.counts["steps"] += 1
        self.check_blocks()

    def plan_failure(self) -> bool:
        """Have the next step fail with a chance of 1 %, before or after it computes."""
        if self.fake is None:
            return False
        self.fake.plans.clear()
        self.fake.fail_before.clear()
        self.fake.fail_after.clear()
        fails = self.chance.random() < 0.01
        if fails:
            self.chance.choice([self.fake.fail_before, self.fake.fail_after]).add(1)
        return fails

    def take(self) -> None:
        for output in self.engine.step():
            job = self.live[output.seq.seq_id]
            job.tell(getattr(output, "choice", 0), output.new_ids)
            if output.finish is not None:
                del self.live[job.job_id]
                job.check_ended()

    def check_blocks(self) -> None:
        use = self.scheduler.kv_use
        held = {block for seq in self.scheduler.running for block in seq.block_table}
        assert len(held) == use.used_blocks
        assert use.used_blocks + self.blocks.num_free_blocks == NUM_BLOCKS
        self.failed &= {seq.seq_id for seq in self.scheduler.running}
        for seq in self.scheduler.running:
            num_empty = len(seq.block_table) * BLOCK_SIZE - seq.num_computed_tokens
            assert num_empty < BLOCK_SIZE or seq.seq_id in self.failed
        if self.counts["steps"] % CHECK_EVERY == 0:
            self.scheduler.check_integrity()

    @property
    def growth_bytes(self) -> int:
        """What the process grew by after a fifth of the requests."""
        return self.resident["end"] - self.resident["a fifth"]

    def figures(self) -> dict[str, int]:
        """What happened, by name."""
        return {
            **self.counts,
            "preemptions": self.scheduler.num_preemptions,
            "blocks swapped out": self.blocks.num_swapped_out,
            "blocks swapped in": self.blocks.num_swapped_in,
            "blocks forked": self.blocks.num_forked,
            "guesses accepted": self.scheduler.speculation.num_accepted_tokens,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak each setting; 0 if memory stayed flat, and an assertion fails if anything else leaks."""
    parser = argparse.ArgumentParser(
        prog="support.engine_soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, help="per setting (%(default)s)")
    parser.add_argument("--tensors", action="store_true", help="a small model on torch")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    options = parser.parse_args(arguments)
    grown = 0
    for setting in SETTINGS:
        parts = real_parts() if options.tensors else fake_parts(setting.vocab_size)
        soak = Soak(setting, options.requests, options.seed, parts)
        with _bar(str(setting), options.requests) as advance:
            soak.run(advance)
        right = "" if soak.fake is None else ", all tokens right"
        print(f"{setting}: every step free + used = {NUM_BLOCKS} blocks{right}")
        print("  " + ", ".join(f"{count:,} {name}" for name, count in soak.figures().items()))
        sizes = (f"{size / 2**20:.1f} ({mark})" for mark, size in soak.resident.items())
        print(f"  resident MiB: {', '.join(sizes)}", flush=True)
        grown += soak.growth_bytes > MAX_GROWTH_BYTES
    print("memory is flat" if not grown else f"MEMORY GROWS in {grown} settings")
    return 1 if grown else 0


def _bar(title: str, total: int) -> "nullcontext[Callable[[int], None]]":
    width = 40

    def show(count: int) -> None:
        filled = width * count // total
        sys.stderr.write(f"\r{title:32} [{'#' * filled:{width}}] {count:,} of {total:,}")
        sys.stderr.write("\n" if count == total else "")

    return nullcontext(show if sys.stderr.isatty() else lambda count: None)


if __name__ == "__main__":
    sys.exit(main())
