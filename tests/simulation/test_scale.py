"""A part of ten million jobs on a thousand workers, through the scheduler of the daemon."""

import random
from pathlib import Path

import pytest

from tidemill_scheduler.simulation.cluster import Cluster
from tidemill_scheduler.simulation.policies import make_policy
from tidemill_scheduler.simulation.simulator import Simulation
from tidemill_scheduler.simulation.workload import Table, Workload

#: Jobs for each worker: those of five prefixes.
JOBS_PER_WORKER, JOBS_PER_PREFIX = 100, 20
#: Routing hashes of 64 tokens that the jobs of one prefix share, and that each has of its own.
SHARED, OWN = 6, 2


def make_workload(num_jobs: int) -> Workload:
    """Jobs of many prefixes, shuffled; no prompt ends with a block."""
    table, next_id = Table(), 0
    for prefix in range(num_jobs // JOBS_PER_PREFIX):
        rng = random.Random(prefix)
        head = list(range(next_id, next_id + SHARED))
        next_id += SHARED
        for _ in range(JOBS_PER_PREFIX):
            ids = [*head, *range(next_id, next_id + OWN)]
            next_id += OWN
            table.append(ids, (64 * len(ids) + rng.randint(1, 63), rng.randint(1, 40)))
    return Workload("scale", table, 64).as_bulk(1).shuffled(1)


@pytest.mark.parametrize("num_workers", [250, pytest.param(1_000, marks=pytest.mark.slow)])
def test_jobs_find_what_they_share_on_hundreds_of_workers(num_workers: int) -> None:
    num_jobs = JOBS_PER_WORKER * num_workers
    workload = make_workload(num_jobs)
    cluster = Cluster(num_workers, kv_tokens=40_000, step_tokens=2048)
    Path("/proc/self/clear_refs").write_text("5")
    kilobytes_before = _memory("VmHWM")

    report = Simulation(cluster, workload).run(make_policy("tidemill"))

    assert report.num_finished == report.num_jobs == num_jobs
    assert report.hit_tokens + report.computed_tokens == report.input_tokens
    # Five prefixes a worker: some are split so that none idles.
    assert report.share_of_bound >= 0.95
    assert _memory("VmHWM") - kilobytes_before < 1_000 * num_workers


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])
