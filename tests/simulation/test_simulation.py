"""What must hold of every run, whatever the policy."""

import json
import math
from collections import Counter
from collections.abc import Callable

import pytest

from support.fifo_policy import FifoPolicy
from support.small_workloads import make_random_workload, make_workload
from tidemill.protocol.errors import ConfigError, SimulationFailed
from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerStatus
from tidemill.protocol.step_cost import StepCost
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.simulation.cluster import Cluster, Faults
from tidemill_scheduler.simulation.generators import eval57
from tidemill_scheduler.simulation.policy import Policy
from tidemill_scheduler.simulation.report import Report
from tidemill_scheduler.simulation.simulator import Simulation
from tidemill_scheduler.simulation.workload import Workload

SECONDS = StepCost(base=1.0, per_token=1.0, per_pair=0.0, per_context=0.0)


def make_scheduler() -> Scheduler:
    return Scheduler(silent_seconds=math.inf)


POLICIES = pytest.mark.parametrize("make_policy", [FifoPolicy, make_scheduler])


def small_cluster(num_workers: int = 3, **settings: object) -> Cluster:
    values = {"kv_tokens": 4000, "step_tokens": 512, **settings}
    return Cluster(num_workers, **values)  # type: ignore[arg-type]


def assert_nothing_is_lost(report: Report) -> None:
    assert report.num_finished == report.num_jobs
    tokens = report.hit_tokens + report.computed_tokens - report.lost_tokens
    assert tokens == report.input_tokens


class Recorder(FifoPolicy):
    """Notes what the simulator tells a policy."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: Counter[str] = Counter()
        self.dispatched: list[tuple[str, int, str]] = []

    def update_worker(self, worker_id: str, status: WorkerStatus, now: float) -> None:
        super().update_worker(worker_id, status, now)
        self.finished.update(ended.job_id for ended in status.finished)

    def tick(self, now: float) -> list[Dispatch]:
        dispatches = super().tick(now)
        self.dispatched += [(d.job.job_id, d.job.attempts, d.worker_id) for d in dispatches]
        return dispatches


@POLICIES
@pytest.mark.parametrize("is_bulk", [True, False])
def test_every_prompt_token_is_found_or_computed_once(
    make_policy: Callable[[], Policy], is_bulk: bool
) -> None:
    workload = make_random_workload(1, interval=0.01)
    report = Simulation(small_cluster(), workload.as_bulk() if is_bulk else workload).run(
        make_policy()
    )

    assert_nothing_is_lost(report)
    assert report.input_tokens == workload.bound().input_tokens
    assert report.output_tokens == sum(job.output_tokens for job in workload)
    assert 0 < report.hit_share <= report.bound_share


@POLICIES
def test_one_worker_with_an_endless_cache_reaches_the_bound_exactly(
    make_policy: Callable[[], Policy],
) -> None:
    workload = make_random_workload(2).shuffled(1).as_bulk()
    cluster = Cluster(1, kv_tokens=10**9, step_tokens=512)

    report = Simulation(cluster, workload).run(make_policy())

    assert report.hit_tokens == workload.bound().hit_tokens
    assert report.share_of_bound == 1.0


@POLICIES
def test_the_same_seed_gives_the_same_bytes(make_policy: Callable[[], Policy]) -> None:
    def run(seed: int) -> str:
        workload = make_random_workload(3, interval=0.02).shuffled(seed)
        cluster = small_cluster(rtt_seconds=0.01, kv_lag_seconds=0.5)
        faults = Faults.random_deaths(3, 0.34, within=2.0, seed=seed)
        return Simulation(cluster, workload, faults=faults, seed=seed).run(make_policy()).to_json()

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert json.loads(run(1))["num_finished"] == 200


def test_measuring_a_policy_changes_nothing_but_the_measure() -> None:
    workload = make_random_workload(3).as_bulk()
    plain = Simulation(small_cluster(), workload).run(make_scheduler())
    measured = Simulation(small_cluster(), workload).run(make_scheduler(), measure=True)

    assert plain.to_json() == measured.to_json()
    assert plain.cost is None
    assert measured.cost is not None
    assert 0 < measured.cost.policy_seconds < measured.cost.total_seconds


def test_a_schedule_of_three_jobs_is_what_a_hand_computes() -> None:
    # One worker, one second for a step and one for a token; hashes stand for 4 tokens.
    workload = make_workload([([1], 6, 3), ([1], 5, 1), ([2], 4, 1)], interval=1.0)
    cluster = Cluster(1, kv_tokens=100, step_tokens=8, cost=SECONDS)

    report = Simulation(cluster, workload).run(FifoPolicy())

    # 0-7: six tokens of the first.  The second (known but for one) came meanwhile and was sent; the
    # third came at 2 and got no credit before 7.
    # 7-14: one token decoded, 1 + 4 prefilled.  14-16: the last token.
    assert (report.hit_tokens, report.computed_tokens) == (4, 11)
    assert report.makespan == 16.0
    assert report.ttft.max == 14.0 - 1.0
    assert report.ttft.p50 == 12.0
    assert report.ttft.mean == pytest.approx((7 + 13 + 12) / 3)
    assert report.tpot.max == (16.0 - 7.0) / 2
    assert report.wait.max == 7.0 - 2.0
    assert (report.imbalance, report.idle_share) == (1.0, 0.0)
    assert report.num_steps == 3


def test_a_dispatch_travels_for_a_round_trip() -> None:
    workload = make_workload([([1], 4, 1)])
    cluster = Cluster(1, kv_tokens=100, cost=SECONDS, rtt_seconds=0.25)

    assert Simulation(cluster, workload).run(FifoPolicy()).makespan == 5.25


def test_decisions_wait_for_the_tick() -> None:
    workload = make_workload([([1], 4, 1)])
    cluster = Cluster(1, kv_tokens=100, cost=SECONDS, tick_seconds=0.5)

    report = Simulation(cluster, workload).run(FifoPolicy())

    assert (report.makespan, report.wait.max) == (5.5, 0.5)


def make_unshared_workload(num_jobs: int) -> Workload:
    jobs: list[tuple[list[int], int, int]] = [
        ([], 50 + 37 * number % 400, 1 + number % 40) for number in range(num_jobs)
    ]
    return make_workload(jobs, tokens_per_hash=64)


# A status in the middle of many steps would give credit back for what a worker found in its cache,
# so bulk jobs, which use all credit there is, must find nothing here.
@POLICIES
@pytest.mark.parametrize("rtt_seconds", [0.0, 0.013])
@pytest.mark.parametrize(
    "workload",
    [make_random_workload(5, 80, interval=0.03), make_unshared_workload(80).as_bulk()],
    ids=["online", "bulk"],
)
def test_many_steps_at_once_give_what_single_steps_give(
    make_policy: Callable[[], Policy], rtt_seconds: float, workload: Workload
) -> None:
    many, single = (
        Simulation(small_cluster(2, rtt_seconds=rtt_seconds, macro_steps=macro), workload).run(
            make_policy()
        )
        for macro in (True, False)
    )

    assert many.hit_tokens == single.hit_tokens
    assert many.num_steps == single.num_steps
    assert many.makespan == pytest.approx(single.makespan)
    assert many.ttft.mean == pytest.approx(single.ttft.mean)
    assert many.tpot.p99 == pytest.approx(single.tpot.p99)
    assert many.num_events < single.num_events


def test_each_job_is_told_as_finished_once() -> None:
    policy = Recorder()
    Simulation(small_cluster(), make_random_workload(6).as_bulk()).run(policy)

    assert set(policy.finished.values()) == {1}
    assert len(policy.finished) == 200


@POLICIES
def test_jobs_of_a_worker_that_dies_run_elsewhere(make_policy: Callable[[], Policy]) -> None:
    workload = make_random_workload(7).as_bulk()
    whole = Simulation(small_cluster(), workload).run(make_policy())
    faults = Faults(deaths=((whole.makespan / 3, 1),), detect_seconds=0.1)

    report = Simulation(small_cluster(), workload, faults=faults).run(make_policy())

    assert_nothing_is_lost(report)
    assert report.num_requeued > 0
    assert report.lost_tokens > 0
    assert report.makespan > whole.makespan


def test_jobs_given_back_name_their_attempt_and_their_last_worker() -> None:
    policy = Recorder()
    faults = Faults(deaths=((0.5, 1),), detect_seconds=0.1)
    report = Simulation(small_cluster(), make_random_workload(8).as_bulk(), faults=faults).run(
        policy
    )
    again = [(job, worker) for job, attempts, worker in policy.dispatched if attempts == 1]

    assert len(again) == report.num_requeued
    assert {worker for _, worker in again} <= {"w0000", "w0002"}
    lost = {job for job, attempts, worker in policy.dispatched if worker == "w0001"}
    assert {job for job, _ in again} <= lost


@POLICIES
def test_late_results_of_a_worker_that_was_given_up_are_fenced(
    make_policy: Callable[[], Policy],
) -> None:
    workload = make_random_workload(9).as_bulk()
    faults = Faults(silences=((0.4, 0),), detect_seconds=0.01)

    report = Simulation(small_cluster(), workload, faults=faults).run(make_policy())

    assert_nothing_is_lost(report)
    assert report.num_fenced > 0
    assert report.num_requeued >= report.num_fenced


@POLICIES
def test_a_worker_that_joins_takes_its_part(make_policy: Callable[[], Policy]) -> None:
    workload = make_random_workload(10).as_bulk()
    alone = Simulation(small_cluster(1), workload).run(make_policy())
    faults = Faults(joins=(alone.makespan / 10,))

    report = Simulation(small_cluster(1), workload, faults=faults).run(make_policy())

    assert_nothing_is_lost(report)
    assert report.num_workers == 2
    assert report.makespan < 0.75 * alone.makespan
    assert report.idle_share < 0.1


@POLICIES
def test_cancelled_jobs_end_and_the_others_finish(make_policy: Callable[[], Policy]) -> None:
    workload = make_random_workload(11).as_bulk()
    times = (0.001, 0.05, 0.2, 0.5, 0.9, 1.3)
    cancels = tuple((when, ordinal) for when in times for ordinal in range(0, 200, 9))
    cluster = small_cluster(rtt_seconds=0.02)

    report = Simulation(cluster, workload, faults=Faults(cancels=cancels)).run(make_policy())

    assert report.num_cancelled == 23
    assert report.num_finished == 200 - 23
    assert report.hit_tokens + report.computed_tokens == report.input_tokens + report.lost_tokens


def test_bulk_jobs_wait_outside_the_policy_beyond_its_bound() -> None:
    seen: list[int] = []

    class Watched(FifoPolicy):
        def add_job(self, job: WaitingJob) -> WaitingJob | None:
            replaced = super().add_job(job)
            seen.append(self.num_waiting)
            return replaced

    cluster = small_cluster(max_waiting=20)
    report = Simulation(cluster, make_random_workload(12).as_bulk()).run(Watched())

    assert report.num_finished == 200
    assert max(seen) == 20


def test_online_jobs_and_bulk_jobs_share_a_cluster() -> None:
    online = make_random_workload(13, 50, interval=0.05).with_priority(-1)
    bulk = make_random_workload(13, 100).as_bulk().salted("bulk")

    report = Simulation(small_cluster(), [online, bulk]).run(make_scheduler())

    assert_nothing_is_lost(report)
    assert {rank: part.num_jobs for rank, part in report.by_class.items()} == {0: 50, 2: 100}
    assert report.bound_share == pytest.approx(
        (online.bound().hit_tokens + bulk.bound().hit_tokens) / report.input_tokens
    )


def test_the_gap_in_service_is_the_range_of_its_difference_while_both_wait() -> None:
    jobs: list[tuple[list[int], int, int]] = [([], 10, 1)] * 4
    workload = make_workload(jobs).as_bulk()
    workload.table.tenant_names[:] = ["a", "b"]
    workload.table.tenants[:] = workload.table.tenants[:0]
    workload.table.tenants.extend([0, 0, 1, 1])
    cluster = Cluster(1, kv_tokens=100, step_tokens=10, max_seqs=1, cost=SECONDS)

    report = Simulation(cluster, workload).run(FifoPolicy(steps_ahead=0.1))

    # The first job is charged 10 + 4 while others of both wait; then a has none left.
    assert report.service_gap == 14


class KvRecorder(Recorder):
    """Follows the workers' caches, and misses every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, set[bytes]] = {}
        self.num_resets = 0
        self._next: dict[str, int] = {}
        self._num_told = 0

    def apply_kv(self, worker_id: str, events: KvEvents) -> bool:
        self._num_told += 1
        if events.seq != self._next.get(worker_id, 1):
            return False
        if self._num_told % 3 == 0:
            return True
        self._next[worker_id] = events.seq + 1
        held = self.held.setdefault(worker_id, set())
        held |= _split(events.stored)
        held -= _split(events.evicted)
        return True

    def reset_kv(self, worker_id: str, snapshot: KvSnapshot) -> None:
        self.num_resets += 1
        self.held[worker_id] = _split(snapshot.digests)
        self._next[worker_id] = snapshot.seq + 1


def _split(digests: bytes) -> set[bytes]:
    return {digests[start : start + 8] for start in range(0, len(digests), 8)}


@pytest.mark.parametrize("lag", [0.0, 0.2])
def test_a_policy_that_missed_kv_events_gets_a_snapshot(lag: float) -> None:
    policy = KvRecorder()
    cluster = small_cluster(2, kv_lag_seconds=lag)

    report = Simulation(cluster, make_random_workload(14).as_bulk()).run(policy)

    assert_nothing_is_lost(report)
    assert policy.num_resets > 3
    # A worker's pool of 4000 tokens has room for 62 hashes of 64.
    assert all(0 < len(held) <= 62 for held in policy.held.values())


def test_heartbeats_keep_idle_workers_known() -> None:
    workload = make_random_workload(15, 30, interval=2.0)
    cluster = small_cluster(heartbeat_seconds=0.5)

    report = Simulation(cluster, workload).run(Scheduler(silent_seconds=1.5))

    assert_nothing_is_lost(report)
    assert report.wait.max == 0.0


class Lazy(FifoPolicy):
    """Lets the last jobs lie."""

    def tick(self, now: float) -> list[Dispatch]:
        return [] if self.num_waiting < 5 else super().tick(now)


@pytest.mark.parametrize("heartbeat_seconds", [0.0, 1.0])
def test_a_policy_that_lets_jobs_lie_is_told_on(heartbeat_seconds: float) -> None:
    cluster = small_cluster(heartbeat_seconds=heartbeat_seconds)
    with pytest.raises(SimulationFailed, match="4 jobs lie"):
        Simulation(cluster, make_random_workload(16, 4).as_bulk()).run(Lazy())


def test_a_policy_that_dispatches_a_job_twice_is_told_on() -> None:
    class Twice(FifoPolicy):
        def tick(self, now: float) -> list[Dispatch]:
            return super().tick(now) * 2

    with pytest.raises(SimulationFailed, match="does not wait"):
        Simulation(small_cluster(), make_random_workload(17).as_bulk()).run(Twice())


def test_a_job_that_no_worker_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_tokens: 100 cannot hold job 0"):
        Simulation(small_cluster(kv_tokens=100), make_workload([([], 99, 2)])).run(FifoPolicy())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": 1, "rtt_seconds": -1.0}, "rtt_seconds"),
        ({"num_workers": 1, "batch_ceiling": 1.5}, "batch_ceiling"),
        ({"num_workers": 1, "max_paused_steps": -1}, "max_paused_steps"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(settings: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Cluster(**settings)  # type: ignore[arg-type]


def test_workloads_of_different_block_sizes_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="tokens for each hash"):
        Simulation(small_cluster(), [make_workload([([], 1, 1)]), make_random_workload(1)])


@pytest.mark.parametrize("seed", [0, 1])
def test_workers_far_away_do_not_run_dry_between_statuses(seed: int) -> None:
    """Only the way there at the beginning and the way back at the end is lost."""
    workload = eval57(seed, 0.1)
    makespans = {}
    for rtt_seconds in (0.0, 0.005, 0.02):
        cluster = Cluster(2, step_tokens=2048, rtt_seconds=rtt_seconds)
        makespans[rtt_seconds] = Simulation(cluster, workload).run(make_scheduler()).makespan

    assert max(makespans.values()) <= 1.01 * makespans[0.0]
