"""What the scheduler takes a worker's speed to be before the worker knows it itself."""

from dataclasses import replace

import pytest

from support.played_shard import TOKENS, PlayedShard, make_info
from support.waiting_jobs import key_of, make_job
from tidemill.protocol.messages import KvSnapshot, WorkerStatus
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill_scheduler.fleet.workers import Worker
from tidemill_scheduler.policy.fleet import Fleet
from tidemill_scheduler.policy.scheduler import Scheduler

#: Machines of all kinds: some whose weights are slow to read, some whose tokens are.
TRUTHS = [
    StepCost(),
    StepCost(base=0.3, per_token=1.6e-3, per_pair=50e-9, per_context=2e-6),
    StepCost(base=5e-3, per_token=300e-6, per_pair=20e-9, per_context=1e-6),
    StepCost(base=20e-3, per_token=20e-6, per_pair=1e-9, per_context=50e-9),
]


def step_of(truth: StepCost, uncached: int, cached: int = 0, decodes: int = 8) -> StepFeatures:
    """A step that prefills behind a cached prefix while others decode."""
    step = StepFeatures(
        prefill_tokens=uncached,
        decode_tokens=decodes,
        prefill_pairs=uncached * cached + uncached * (uncached - 1) // 2,
        context_tokens=decodes * 1000,
    )
    return step.model_copy(update={"seconds": truth.predict(step)})


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    for name in names:
        fleet.add(Worker(make_info(name), 0.0))
    return fleet


@pytest.mark.parametrize("truth", TRUTHS)
def test_a_worker_whose_cache_has_most_of_its_prompts_looks_as_fast_as_one_that_computes_them(
    truth: StepCost,
) -> None:
    fleet = fleet_of("warm", "cold")
    for number in range(10):
        warm = step_of(truth, 3 + number, cached=2000)
        fleet.learn("warm", WorkerStatus(step=warm))
        fleet.learn("cold", WorkerStatus(step=step_of(truth, 2000)))
    prices = [fleet.cost(name).prefill_seconds(1000, 2000) for name in ("warm", "cold")]
    assert max(prices) / min(prices) < 5
    assert prices[1] == pytest.approx(truth.prefill_seconds(1000, 2000), rel=0.5)


def test_a_slow_worker_looks_as_many_times_slower_from_its_first_step_on() -> None:
    fleet = fleet_of("fast", "slow")
    step = step_of(StepCost(), 500)
    fleet.learn("fast", WorkerStatus(step=step))
    fleet.learn("slow", WorkerStatus(step=step.model_copy(update={"seconds": 7 * step.seconds})))
    fast, slow = fleet.cost("fast").model_dump(), fleet.cost("slow").model_dump()
    assert slow == pytest.approx({name: 7 * value for name, value in fast.items()})


def test_one_slow_step_is_forgotten() -> None:
    fleet = fleet_of("w")
    step = step_of(StepCost(), 500)
    fleet.learn("w", WorkerStatus(step=step.model_copy(update={"seconds": 2.0})))
    for _ in range(40):
        fleet.learn("w", WorkerStatus(step=step))
    assert fleet.cost("w").per_token == pytest.approx(StepCost().per_token, rel=0.05)


def test_what_a_worker_has_fitted_itself_holds_unless_tokens_are_free_in_it() -> None:
    fleet = fleet_of("w")
    fitted = StepCost(base=1e-3, per_token=1e-6, per_pair=1e-9, per_context=1e-8)
    free = fitted.model_copy(update={"per_token": 0.0})
    step = step_of(StepCost(), 500)
    fleet.learn("w", WorkerStatus(step=step, step_cost=free))
    assert fleet.cost("w").model_dump() == pytest.approx(StepCost().model_dump())
    fleet.learn("w", WorkerStatus(step=step, step_cost=fitted))
    assert fleet.cost("w") == fitted
    assert fleet.tokens_per_second == pytest.approx(1e6)


def test_an_interactive_job_goes_where_its_prefix_is_although_few_tokens_came_with_each_step() -> (
    None
):
    """The holder has run nothing but hits; the other one long prompts."""
    shard = PlayedShard(Scheduler(silent_seconds=1e9))
    holder, other = shard.join(tells_cache=True), shard.join(tells_cache=True)
    path = tuple(range(30))
    snapshot = KvSnapshot(seq=1, digests=key_of(path))
    shard.scheduler.reset_kv(holder.info.worker_id, snapshot)
    for worker, uncached, cached in ((holder, 4, 30 * TOKENS), (other, 2000, 0)):
        status = replace_step(worker.status(), step_of(TRUTHS[1], uncached, cached))
        shard.scheduler.update_worker(worker.info.worker_id, status, shard.now)
    job = replace(make_job((*path, 99), cost=32 * TOKENS), queue="p0:t", priority=-1)
    shard.add(job)
    (dispatch,) = shard.tick()
    assert dispatch.worker_id == holder.info.worker_id


def replace_step(status: WorkerStatus, step: StepFeatures) -> WorkerStatus:
    return status.model_copy(update={"step": step})
