"""One simulated run, described by values alone, so that it can be made in any process."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.settings import PolicySettings
from tidemill_scheduler.simulation.cluster import Cluster, Faults
from tidemill_scheduler.simulation.generators import GENERATORS
from tidemill_scheduler.simulation.policies import POLICIES, tidemill
from tidemill_scheduler.simulation.policy import Policy
from tidemill_scheduler.simulation.report import Report
from tidemill_scheduler.simulation.simulator import Simulation
from tidemill_scheduler.simulation.traces import load_mooncake
from tidemill_scheduler.simulation.workload import Workload

ROOT = Path(__file__).parents[1]
TRACES = ROOT.parent / "shared" / "data" / "traces"
TRACE_NAMES = ("conversation", "synthetic")

#: Mixes the arrivals of so many neighbours, for seeds other than 0 of an online run: enough to make
#: it another run, and not so many that turns of a conversation drift apart.
_ONLINE_WINDOW = 32

KV_TOKENS = Cluster(1).kv_tokens

#: The scheduler of the daemon with one thing switched off, beside the policies of the simulator.
_VARIANTS: dict[str, Callable[[], Policy]] = {
    "tidemill, unfair": lambda: tidemill(PolicySettings(tenant_quantum=10**12)),
    "tidemill, fifo": lambda: tidemill(PolicySettings(order="fifo")),
}
MAKERS = {**POLICIES, **_VARIANTS}


@dataclass(frozen=True)
class Spec:
    """What to simulate; ``load`` 0 is bulk, and ``scale`` the share of the jobs.

    ``bulk`` names a workload of the batch class that waits beside an online one.  Worker 0 dies
    after the share ``dies_after`` of the time that the run takes without.  ``repeat`` tells runs
    apart that are to be the same.
    """

    workload: str
    seed: int = 0
    policy: str = "tidemill"
    workers: int = 8
    copies: int = 1
    load: float = 0.0
    priority: int = 1
    kv_factor: int = 1
    step_tokens: int = 8192
    rtt_ms: float = 0.0
    kv_lag_ms: float = 0.0
    tpot_slo_ms: float = 0.0
    batch_ceiling: float = 0.85
    bulk: str = ""
    bulk_copies: int = 1
    dies_after: float = 0.0
    scale: float = 1.0
    repeat: int = 0

    def but(self, **changes: Any) -> "Spec":
        """Return the same with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    ``bulk_rate`` are prompt tokens of the batch class that went out in a second while online jobs
    came and bulk waited, 0 in a run without online jobs.
    """

    report: Report
    bulk_rate: float
    digest: str
    wall_seconds: float


def simulate(spec: Spec, traces: Path = TRACES) -> Outcome:
    """Run a simulation; the digest is that of the report's bytes."""
    began = time.perf_counter()
    workloads = make_workloads(spec, traces)
    faults = Faults()
    if spec.dies_after:
        alive = simulate(spec.but(dies_after=0.0), traces).report
        faults = Faults(deaths=((spec.dies_after * alive.makespan, 0),))
    policy = _BulkMeter(MAKERS[spec.policy](), _last_arrival(workloads))
    simulation = Simulation(_cluster(spec), workloads, faults=faults, seed=spec.seed)
    report = simulation.run(policy)
    digest = hashlib.sha256(report.to_json().encode()).hexdigest()
    return Outcome(report, policy.rate, digest, time.perf_counter() - began)


def make_workloads(spec: Spec, traces: Path) -> list[Workload]:
    """Return the workload of a run and the bulk beside it."""
    first = _make(spec.workload, spec.seed, spec, traces)
    if not spec.load:
        return [_as_bulk(first.copies(spec.copies), spec) if not first.is_bulk else first]
    online = first.compressed(spec.load).with_priority(spec.priority)
    if spec.seed:
        online = online.shuffled(spec.seed, window=_ONLINE_WINDOW)
    if not spec.bulk:
        return [online]
    beside = _make(spec.bulk, spec.seed, spec, traces).copies(spec.bulk_copies)
    return [online, _as_bulk(beside, spec).salted("bulk")]


def _make(name: str, seed: int, spec: Spec, traces: Path) -> Workload:
    if name in GENERATORS:
        return GENERATORS[name](seed, spec.scale)
    path = traces / f"{name}_trace.jsonl"
    if spec.scale >= 1:
        return load_mooncake(path)
    with path.open() as file:
        num_jobs = sum(1 for _ in file)
    return load_mooncake(path, limit=max(8, round(spec.scale * num_jobs)))


def _as_bulk(workload: Workload, spec: Spec) -> Workload:
    return workload.shuffled(spec.seed).as_bulk()


def _cluster(spec: Spec) -> Cluster:
    return Cluster(
        spec.workers,
        kv_tokens=spec.kv_factor * KV_TOKENS,
        step_tokens=spec.step_tokens,
        rtt_seconds=spec.rtt_ms / 1000,
        kv_lag_seconds=spec.kv_lag_ms / 1000,
        tpot_slo_seconds=spec.tpot_slo_ms / 1000,
        batch_ceiling=spec.batch_ceiling,
    )


def _last_arrival(workloads: Sequence[Workload]) -> float:
    return max((w.table.arrivals[-1] / w.load for w in workloads if not w.is_bulk), default=0.0)


class _BulkMeter:
    """Passes every call on, and counts what goes out of the batch class until a time."""

    def __init__(self, policy: Policy, until: float) -> None:
        self._policy = policy
        self._until = until
        self._tokens = 0
        self._last_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def rate(self) -> float:
        """Prompt tokens a second, those found in caches included."""
        return self._tokens / self._last_at if self._last_at else 0.0

    def tick(self, now: float) -> Sequence[Dispatch]:
        """Decide, and count."""
        dispatches = self._policy.tick(now)
        tokens = sum(d.job.cost for d in dispatches if d.job.priority > 0)
        if tokens and now <= self._until:
            self._tokens += tokens
            self._last_at = now
        return dispatches
