"""While somebody reads along, prefills are cut so that steps keep to their time."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_engine import FakeProcessor, FakeRunner, FakeSampler, make_seq
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.cost_learner import FIRST_FIT, REFIT_EVERY, WINDOW, CostLearner
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_features import features_of
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler
from tidemill_gpuworker.steps.time_budget import TimeBudget

BLOCK_SIZE = 4
#: One second per token, another per hundred pairs: easy to count.
COST = StepCost(base=2.0, per_token=1.0, per_pair=0.01, per_context=0.1)


def make_scheduler(
    slo: float, cost: StepCost = COST, *, budget: int = 200, num_blocks: int = 400
) -> StepScheduler:
    config = StepConfig(
        max_model_len=num_blocks * BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        tpot_slo_seconds=slo,
    )
    scheduler = StepScheduler(config, BlockManager(num_blocks, BLOCK_SIZE))
    scheduler.step_cost = cost
    return scheduler


def own_prompt(number: int, length: int) -> list[int]:
    return [1000 * number + position for position in range(length)]


def add(scheduler: StepScheduler, number: int, length: int, priority: int = 0) -> Sequence:
    seq = make_seq(own_prompt(number, length), 100, priority=priority)
    scheduler.add(seq)
    return seq


def advance(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, [(7,)] * len(plan.sampling))
    scheduler.check_integrity()
    return plan


def predicted(plan: StepPlan, cost: StepCost = COST) -> float:
    return cost.predict(features_of(plan))


def num_prefilled(plan: StepPlan) -> int:
    return sum(item.num_tokens for item in plan.scheduled if item.num_tokens > 1)


@pytest.mark.parametrize("priority", [-1, 0])
def test_beside_a_decode_a_prefill_gets_as_many_tokens_as_fit_into_the_time(priority: int) -> None:
    scheduler = make_scheduler(slo=60.0)
    add(scheduler, 1, 10, priority)
    advance(scheduler)
    add(scheduler, 2, 300)
    starts = []
    for _ in range(3):
        plan = advance(scheduler)
        chunk = plan.scheduled[-1]
        starts.append(chunk.start)
        assert predicted(plan) <= 60.0
        one_more = ScheduledSequence(chunk.seq, chunk.start, chunk.num_tokens + 1)
        assert predicted(StepPlan((*plan.scheduled[:-1], one_more))) > 60.0
    # The further it has come the longer each token takes, so chunks shrink.
    assert starts[1] - starts[0] > starts[2] - starts[1] > BLOCK_SIZE


def test_without_a_decode_or_beside_batch_decodes_only_tokens_count() -> None:
    scheduler = make_scheduler(slo=10.0)
    add(scheduler, 1, 150, priority=1)
    assert advance(scheduler).num_tokens == 150
    add(scheduler, 2, 300)
    assert advance(scheduler).num_tokens == 200


def test_a_time_that_cannot_be_kept_leaves_each_step_one_block_of_prefill() -> None:
    scheduler = make_scheduler(slo=0.5)
    first = add(scheduler, 1, 3)
    advance(scheduler)
    late, later = add(scheduler, 2, 10), add(scheduler, 3, 10)
    assert [item.num_tokens for item in advance(scheduler).scheduled] == [1, BLOCK_SIZE]
    # The second step computes 4 tokens, the third the last 2 and the first 2 of the other prompt.
    for num_prefilled_tokens in (4, 4, 4, 4):
        assert num_prefilled(advance(scheduler)) == num_prefilled_tokens
    assert [len(seq.output_ids) for seq in (first, late, later)] == [6, 3, 1]


def test_a_decode_is_never_left_out_for_want_of_time() -> None:
    scheduler = make_scheduler(slo=10.0)
    seqs = [add(scheduler, number, 3) for number in range(16)]
    for _ in range(8):
        advance(scheduler)
    assert {len(seq.output_ids) for seq in seqs} == {8}


def test_limits_of_time_that_cannot_work_are_refused() -> None:
    for slo in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="tpot_slo_seconds"):
            StepConfig(max_model_len=8, tpot_slo_seconds=slo)
    with pytest.raises(ConfigError, match="can be cut"):
        StepConfig(max_model_len=8, tpot_slo_seconds=1.0, enable_chunked_prefill=False)


COSTS = st.builds(
    StepCost,
    base=st.sampled_from([0.0, 0.004, 1.0]),
    per_token=st.sampled_from([0.0, 1e-5, 0.01]),
    per_pair=st.sampled_from([0.0, 1e-9, 1e-5]),
    per_context=st.sampled_from([0.0, 1e-7]),
)


@settings(max_examples=300, deadline=None)
@given(
    cost=COSTS,
    seconds=st.floats(1e-6, 2.0),
    start=st.integers(0, 5000),
    wanted=st.integers(2, 400),
    least=st.integers(0, 16),
)
def test_the_time_holds_exactly_as_many_tokens_as_one_by_one_would_fit(
    cost: StepCost, seconds: float, start: int, wanted: int, least: int
) -> None:
    most = TimeBudget(cost, seconds, least).most_tokens(start, wanted)

    def takes(count: int) -> float:
        if count == 1:
            return cost.predict(StepFeatures(decode_tokens=1, context_tokens=start + 1))
        pairs = sum(range(start, start + count))
        return cost.predict(StepFeatures(prefill_tokens=count, prefill_pairs=pairs))

    # Rounding may decide where a token fits to the last digit.
    certain = max((n for n in range(wanted + 1) if takes(n) <= seconds * (1 - 1e-9)), default=0)
    possible = max((n for n in range(wanted + 1) if takes(n) <= seconds + 1e-12), default=0)
    assert min(wanted, max(least, certain)) <= most <= min(wanted, max(least, possible))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 80), st.sampled_from([-1, 0, 1])), min_size=1, max_size=10
    ),
    slo=st.floats(5.0, 120.0),
    arrivals=st.lists(st.integers(0, 6), min_size=10, max_size=10),
)
def test_no_step_beside_a_reader_is_predicted_to_take_longer(
    lengths: list[tuple[int, int]], slo: float, arrivals: list[int]
) -> None:
    scheduler = make_scheduler(slo)
    for number in range(40):
        for index, (length, priority) in enumerate(lengths):
            if arrivals[index] == number:
                add(scheduler, index, length, priority)
        if not scheduler.has_work:
            continue
        running = scheduler.running
        decodes = [seq for seq in running if seq.num_uncomputed_tokens == 1]
        is_watched = any(seq.priority <= 0 for seq in decodes)
        plan = advance(scheduler)
        if is_watched and predicted(plan) > slo:
            assert plan.num_tokens <= len(decodes) + BLOCK_SIZE


class Clock:
    """Time that passes only while the model computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(FakeRunner):
    """Takes the time that a true cost says, and now and then much longer."""

    def __init__(self, scheduler: StepScheduler, truth: StepCost, clock: Clock) -> None:
        blocks = scheduler.block_manager
        super().__init__(blocks.num_blocks, blocks.block_size)
        self.truth, self.clock = truth, clock

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute, and let the time pass."""
        slowness = 30.0 if len(self.plans) % 20 == 7 else 1.0
        self.clock.now += self.truth.predict(features_of(plan)) * slowness
        return super().execute(plan)


def prompts() -> Iterator[list[int]]:
    number = 0
    while True:
        number += 1
        yield own_prompt(number, 20 + 37 * (number % 9))


def test_a_worker_learns_its_own_cost_and_keeps_to_the_time_from_then_on() -> None:
    truth = StepCost(base=0.01, per_token=2e-3, per_pair=3e-6, per_context=1e-5)
    slo = 0.1
    scheduler = make_scheduler(slo, StepCost(), budget=150)
    clock = Clock()
    runner = TimedRunner(scheduler, truth, clock)
    steps: list[StepFeatures] = []
    engine = Engine(
        runner,
        FakeSampler(),
        scheduler,
        lambda seq: FakeProcessor(seq.params.max_tokens or 1),
        clock=clock,
        on_step=steps.append,
    )
    supply = prompts()
    while len(steps) < 2 * FIRST_FIT:
        if len(scheduler.running) + len(scheduler.waiting) < 5:
            engine.add(make_seq(next(supply), 20))
        engine.step()
        assert (engine.learner.fitted is None) == (len(steps) < FIRST_FIT)
    assert steps == [
        features_of(plan, step.seconds) for plan, step in zip(runner.plans, steps, strict=True)
    ]
    assert engine.figures.last_step == steps[-1]
    assert scheduler.step_cost == engine.learner.fitted
    times = [
        truth.predict(step) for step in steps if step.prefill_tokens > 4 and step.decode_tokens
    ]
    before = [truth.predict(step) for step in steps[:FIRST_FIT]]
    assert max(before) > 2 * slo, "the cost that nobody measured let steps take too long"
    assert times
    after = [truth.predict(s) for s in steps[FIRST_FIT:] if s.decode_tokens]
    assert max(after) <= 1.02 * slo


def test_many_decodes_do_not_push_out_what_is_known_of_prefills() -> None:
    learner = CostLearner()
    decode = StepFeatures(decode_tokens=4, context_tokens=400, seconds=COST.base + 44.0)
    for number in range(WINDOW):
        tokens = 10 + number % 50
        step = StepFeatures(prefill_tokens=tokens, prefill_pairs=tokens * number)
        learner.observe(step.model_copy(update={"seconds": COST.predict(step)}))
    for _ in range(10 * REFIT_EVERY):
        learner.observe(decode)
    assert learner.fitted is not None
    assert learner.fitted.per_token == pytest.approx(COST.per_token, rel=1e-3)
    assert learner.fitted.per_pair == pytest.approx(COST.per_pair, rel=1e-3)
