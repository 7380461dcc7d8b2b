"""A hundredth of ten million jobs on a thousand workers, through the scheduler of the daemon."""

import random
from pathlib import Path

from tidemill_scheduler.simulation.cluster import Cluster
from tidemill_scheduler.simulation.policies import make_policy
from tidemill_scheduler.simulation.simulator import Simulation
from tidemill_scheduler.simulation.workload import Table, Workload

NUM_JOBS = 100_000
NUM_WORKERS = 1_000
JOBS_PER_PREFIX = 20
#: Routing hashes of 64 tokens that the jobs of one prefix share, and that each has of its own.
SHARED, OWN = 6, 2


def make_workload() -> Workload:
    """Jobs of 5,000 prefixes, shuffled; no prompt ends with a block."""
    table, next_id = Table(), 0
    for prefix in range(NUM_JOBS // JOBS_PER_PREFIX):
        rng = random.Random(prefix)
        head = list(range(next_id, next_id + SHARED))
        next_id += SHARED
        for _ in range(JOBS_PER_PREFIX):
            ids = [*head, *range(next_id, next_id + OWN)]
            next_id += OWN
            table.append(ids, (64 * len(ids) + rng.randint(1, 63), rng.randint(1, 40)))
    return Workload("scale", table, 64).as_bulk(1).shuffled(1)


def test_a_hundred_thousand_jobs_find_what_they_share_on_a_thousand_workers() -> None:
    workload = make_workload()
    cluster = Cluster(NUM_WORKERS, kv_tokens=40_000, step_tokens=2048)
    Path("/proc/self/clear_refs").write_text("5")
    kilobytes_before = _memory("VmHWM")

    report = Simulation(cluster, workload).run(make_policy("tidemill"))

    assert report.num_finished == report.num_jobs == NUM_JOBS
    assert report.hit_tokens + report.computed_tokens == report.input_tokens
    # Five prefixes a worker: some are split so that none idles.
    assert report.share_of_bound >= 0.95
    assert _memory("VmHWM") - kilobytes_before < 1_000_000


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])
