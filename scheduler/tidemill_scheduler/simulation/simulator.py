"""A discrete-event simulation of a cluster around one policy; it has no clock of its own."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.cluster import Cluster, Faults
from tidemill_scheduler.simulation.policy import Policy
from tidemill_scheduler.simulation.report import PolicyCost, Report, make_report
from tidemill_scheduler.simulation.run import Run
from tidemill_scheduler.simulation.timed_policy import TimedPolicy
from tidemill_scheduler.simulation.workload import Workload

_Handler = Callable[[Any], None]


class Simulation:
    """One cluster, its workloads and its faults; ``run`` it with as many policies as wanted.

    Everything random comes from ``seed``.  Events at the same time happen in the order in which
    they were scheduled, and the policy decides after all of them.
    """

    def __init__(
        self,
        cluster: Cluster,
        workloads: Workload | Items[Workload],
        *,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        self.cluster = cluster
        self.workloads = [workloads] if isinstance(workloads, Workload) else list(workloads)
        self.faults = faults or Faults()
        self.seed = seed
        sizes = {workload.tokens_per_hash for workload in self.workloads}
        if len(sizes) != 1:
            raise ConfigError(
                f"workloads: they have {sorted(sizes)} tokens for each hash",
                fix="Give at least one workload, and mix only those of the same block size.",
            )
        self.tokens_per_hash = sizes.pop()
        self._run: Run | None = None

    @property
    def num_finished(self) -> int:
        """Jobs that have finished in the latest run; another thread may ask while it goes on."""
        return self._run.ledger.num_finished if self._run else 0

    def run(self, policy: Policy, *, measure: bool = False) -> Report:
        """Simulate until all jobs have ended.

        With ``measure`` the time spent in the policy is reported too, which no seed fixes.  Raises
        ``SimulationFailed`` if the policy lets jobs lie or a count does not add up.
        """
        timed = TimedPolicy(policy) if measure else None
        began = time.perf_counter()
        run = Run(self.cluster, self.workloads, timed or policy, faults=self.faults, seed=self.seed)
        self._run = run
        run.work()
        total_seconds = time.perf_counter() - began
        report = make_report(
            [workload.bound() for workload in self.workloads],
            run.ledger,
            run.members,
            name="+".join(workload.name for workload in self.workloads),
            seed=self.seed,
            makespan=run.now,
        )
        if timed is None:
            return report
        cost = PolicyCost(
            1e6 * timed.seconds / max(1, run.ledger.num_dispatches),
            timed.seconds,
            total_seconds,
            run.ledger.num_events / total_seconds,
        )
        return replace(report, cost=cost)
