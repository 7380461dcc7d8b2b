"""Any workload on any engine: what must hold after every step, and what must come out."""

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_engine import (
    VOCAB_SIZE,
    FakeProcessor,
    FakeRunner,
    FakeSampler,
    generate,
    make_seq,
)
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.places import NO_BLOCK
from tidemill_gpuworker.speculation.config import SpeculativeConfig
from tidemill_gpuworker.speculation.drafter import Drafter
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

#: No workload below needs more steps unless somebody starves.
MAX_STEPS = 4000


@dataclass(frozen=True)
class Job:
    """A prompt, what is wanted of it, and in which steps it comes and perhaps goes."""

    prompt: list[int]
    max_tokens: int
    priority: int
    salt: str | None
    arrives: int
    leaves: int | None


@dataclass(frozen=True)
class Limits:
    """The size of an engine."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    threshold: int
    chunked: bool
    caching: bool
    most_paused: int
    num_swap_blocks: int = 0
    swaps_first: bool = False
    window: int | None = None
    static: bool = False
    num_drafted: int = 0

    @property
    def vocab_size(self) -> int:
        """So few that guesses often come true, where there are any."""
        return 2 if self.num_drafted else VOCAB_SIZE

    @property
    def max_model_len(self) -> int:
        return self.block_size * self.num_blocks

    def make_scheduler(self) -> StepScheduler:
        budget = self.budget if self.chunked else max(self.budget, self.max_model_len)
        config = StepConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=min(self.max_num_seqs, budget),
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=self.threshold,
            enable_chunked_prefill=self.chunked,
            max_paused_steps=self.most_paused,
            scheduling_mode="static" if self.static else "continuous",
        )
        blocks = BlockManager(
            self.num_blocks,
            self.block_size,
            watermark=0.1,
            enable_prefix_caching=self.caching,
            num_swap_blocks=self.num_swap_blocks,
            swap_on_preemption=self.swaps_first,
            window=self.window,
        )
        return StepScheduler(config, blocks, self.make_drafter())

    def make_drafter(self) -> Drafter | None:
        if not self.num_drafted:
            return None
        config = SpeculativeConfig(
            num_speculative_tokens=self.num_drafted, prompt_lookup_max=4, prompt_lookup_min=1
        )
        return Drafter(config, self.max_model_len)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts of few token values: many share a prefix, some are equal."""
    template = draw(st.sampled_from([[], [0] * 6, [0, 1] * 7, [0, 1, 0, 1, 1, 1, 0, 0, 1]]))
    return [*template, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))]


JOBS = st.builds(
    Job,
    prompt=prompts(),
    max_tokens=st.integers(1, 12),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
    salt=st.sampled_from([None, None, "a"]),
    arrives=st.integers(0, 8),
    leaves=st.one_of(st.none(), st.none(), st.integers(1, 12)),
)
LIMITS = st.builds(
    Limits,
    block_size=st.integers(1, 5),
    num_blocks=st.integers(7, 20),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    threshold=st.sampled_from([0, 0, 1, 3, 7]),
    chunked=st.sampled_from([True, True, True, False]),
    caching=st.sampled_from([True, True, True, False]),
    most_paused=st.sampled_from([0, 1, 3, 64]),
    num_swap_blocks=st.sampled_from([0, 0, 1, 4, 30]),
    swaps_first=st.booleans(),
    window=st.sampled_from([None, None, None, 1, 3, 8]),
    static=st.sampled_from([False, False, False, False, True]),
    num_drafted=st.sampled_from([0, 0, 1, 3, 7]),
)
FAILURES = st.sets(st.integers(1, 25), max_size=4)


class CheckedRunner(FakeRunner):
    """Checks each plan before it runs it."""

    def __init__(self, scheduler: StepScheduler, vocab_size: int) -> None:
        blocks = scheduler.block_manager
        super().__init__(blocks.num_blocks, blocks.block_size, blocks.window, vocab_size)
        self.scheduler = scheduler

    def execute(self, plan: StepPlan) -> list[int]:
        self.check_limits(plan)
        self.check_order(plan)
        self.check_blocks(plan)
        self.scheduler.check_integrity()
        return super().execute(plan)

    def check_limits(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        for item in plan.scheduled:
            assert item.num_tokens >= 1
            assert item.known_end == item.seq.num_computed_tokens <= item.seq.num_tokens
            num_known = item.num_tokens - len(item.draft)
            assert not item.draft or num_known == 1
            if config.enable_chunked_prefill and config.long_prefill_token_threshold:
                assert num_known <= config.long_prefill_token_threshold
            assert config.enable_chunked_prefill or item.samples

    def check_order(self, plan: StepPlan) -> None:
        counts = [item.num_tokens for item in plan.scheduled]
        assert all(count == 1 for count in counts[: plan.num_decodes])
        assert all(count > 1 for count in counts[plan.num_decodes :])
        scheduled = {item.seq.seq_id for item in plan.scheduled}
        assert not scheduled & {seq.seq_id for seq in plan.preempted}

    def check_blocks(self, plan: StepPlan) -> None:
        contents: dict[int, object] = {}
        for seq in self.scheduler.running:
            for block, content in self.contents(seq):
                assert contents.setdefault(block, content) == content
        written = [block for item in plan.scheduled for block in self.written(item)]
        assert len(written) == len(set(written)), "two sequences write the same block"

    def contents(self, seq: Sequence) -> Iterator[tuple[int, object]]:
        """What each block of ``seq`` is for; equal for two holders of a full block only."""
        for index, block in enumerate(seq.block_table):
            if block == NO_BLOCK:
                continue
            end = (index + 1) * self.block_size
            if end <= seq.num_tokens:
                yield block, (seq.extra_keys, seq.token_slice(0, end))
            else:
                yield block, seq.seq_id

    def written(self, item: ScheduledSequence) -> list[int]:
        size = self.block_size
        return item.seq.block_table[item.start // size : -(-item.end // size)]


class Workload:
    """Jobs on an engine, and what became of them."""

    def __init__(self, limits: Limits, jobs: list[Job]) -> None:
        self.scheduler = limits.make_scheduler()
        self.runner = CheckedRunner(self.scheduler, limits.vocab_size)
        self.engine = Engine(self.runner, FakeSampler(), self.scheduler, self.make_processor)
        self.jobs = [(job, self.make_seq(job)) for job in jobs]
        self.told: dict[str, list[int]] = {seq.seq_id: [] for _, seq in self.jobs}
        self.ended: set[str] = set()
        self.aborted: set[str] = set()

    def make_seq(self, job: Job) -> Sequence:
        prompt = job.prompt[: self.scheduler.config.max_model_len - 1]
        return make_seq(prompt, job.max_tokens, priority=job.priority, salt=job.salt)

    def make_processor(self, seq: Sequence) -> FakeProcessor:
        return FakeProcessor(self.num_wanted(seq))

    def num_wanted(self, seq: Sequence) -> int:
        assert seq.params.max_tokens is not None
        room = self.scheduler.config.max_model_len - seq.num_prompt_tokens
        return min(seq.params.max_tokens, room)

    def run(self) -> None:
        last_arrival = max((job.arrives for job, _ in self.jobs), default=0)
        for number in range(MAX_STEPS):
            self.come_and_go(number)
            self.step()
            self.scheduler.check_integrity()
            if number >= last_arrival and not self.engine.has_work:
                return
        raise AssertionError(f"still at work after {MAX_STEPS} steps")

    def come_and_go(self, number: int) -> None:
        for job, seq in self.jobs:
            if job.arrives == number:
                self.engine.add(seq)
            if job.leaves == number and self.engine.abort(seq.seq_id) is seq:
                self.aborted.add(seq.seq_id)

    def step(self) -> None:
        try:
            outputs = self.engine.step()
        except RuntimeError:
            return
        for output in outputs:
            assert output.seq.seq_id not in self.ended | self.aborted
            self.told[output.seq.seq_id] += output.new_ids
            if output.finish is not None:
                self.ended.add(output.seq.seq_id)


@settings(max_examples=300, deadline=None)
@given(limits=LIMITS, jobs=st.lists(JOBS, max_size=8), before=FAILURES, after=FAILURES)
def test_every_sequence_gets_its_own_tokens_and_every_block_comes_back(
    limits: Limits, jobs: list[Job], before: set[int], after: set[int]
) -> None:
    work = Workload(limits, jobs)
    work.runner.fail_before, work.runner.fail_after = before, after

    work.run()

    for _, seq in work.jobs:
        num_wanted = work.num_wanted(seq)
        expected = generate(seq.prompt_ids, num_wanted, limits.window, limits.vocab_size)
        told = work.told[seq.seq_id]
        if seq.seq_id in work.aborted:
            assert told == expected[: len(told)]
        else:
            assert told == expected
            assert seq.seq_id in work.ended
    assert work.scheduler.block_manager.num_free_blocks == limits.num_blocks


@settings(max_examples=200, deadline=None)
@given(
    all_prompts=st.lists(prompts(), min_size=1, max_size=10),
    block_size=st.integers(1, 5),
    budget=st.integers(10, 60),
    threshold=st.sampled_from([0, 0, 1, 4, 9]),
)
def test_with_room_enough_no_full_block_is_ever_computed_twice(
    all_prompts: list[list[int]], block_size: int, budget: int, threshold: int
) -> None:
    limits = Limits(
        block_size, 400, 10, budget, threshold, chunked=True, caching=True, most_paused=64
    )
    # With a last token of its own no prompt begins another one, and the order does not matter.
    ended = [[*prompt, 100 + number] for number, prompt in enumerate(all_prompts)]
    work = Workload(limits, [Job(prompt, 3, 0, None, 0, None) for prompt in ended])

    work.run()

    unique = num_unique_tokens(ended, block_size)
    assert work.engine.figures.num_prompt_tokens == unique
    assert work.engine.figures.num_cached_tokens == sum(map(len, ended)) - unique


def num_unique_tokens(all_prompts: list[list[int]], block_size: int) -> int:
    """Tokens of the distinct full blocks and of what each prompt has behind its last one."""
    blocks = {
        tuple(prompt[:end])
        for prompt in all_prompts
        for end in range(block_size, len(prompt) + 1, block_size)
    }
    return len(blocks) * block_size + sum(len(prompt) % block_size for prompt in all_prompts)
