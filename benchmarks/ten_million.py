"""Simulate ten million jobs on a thousand workers, on one core: does it still work, and how fast?

    python benchmarks/ten_million.py --json figures.json

Copies of Mooncake's conversation trace, each with prefixes of its own, go through the scheduler of
the daemon as one bulk workload, of which a million jobs wait at a time, as in the daemon.

How to read the figures
  cpu, wall   seconds of processor time and of the clock
  us per job  processor time for everything: making the job, deciding, and its simulated worker
  of bound    prompt tokens found in a cache, against one cache without end
  memory      the largest size of this process
"""

import argparse
import gc
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scheduling_runs import TRACES

from tidemill_scheduler.simulation.cli.progress import run_policies
from tidemill_scheduler.simulation.cluster import Cluster
from tidemill_scheduler.simulation.simulator import Simulation
from tidemill_scheduler.simulation.traces import load_trace

#: Jobs that wait at a time, and within which the copies are mixed.
WAITING = 1_000_000


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--copies", type=int, default=831, help="of 12,031 jobs each (%(default)s)")
    add("--workers", type=int, default=1_000, help="simulated workers (%(default)s)")
    add("--traces", type=Path, default=TRACES, help="directory of Mooncake's traces (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(arguments)


def measure(copies: int, workers: int, traces: Path) -> dict[str, float]:
    """Run the simulation; return its figures."""
    trace = load_trace(traces / "conversation_trace.jsonl")
    workload = trace.copies(copies).shuffled(1, window=WAITING).as_bulk()
    # What waits makes no cycles, and looking through all of it again and again takes long.
    gc.disable()
    began, cpu_began = time.time(), time.process_time()
    simulation = Simulation(Cluster(workers), workload)
    report = run_policies(["tidemill"], simulation, workload.num_jobs)["tidemill"]
    cpu = time.process_time() - cpu_began
    return {
        "jobs": workload.num_jobs,
        "workers": workers,
        "cpu_seconds": cpu,
        "wall_seconds": time.time() - began,
        "us_per_job": cpu / workload.num_jobs * 1e6,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "hit_share": report.hit_share,
        "share_of_bound": report.share_of_bound,
        "makespan": report.makespan,
        "imbalance": report.imbalance,
    }


def print_report(figures: dict[str, float]) -> None:
    """Print a table of the figures."""
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.4g}")
    Console().print(table)


def main() -> None:
    options = parse_arguments()
    figures = measure(options.copies, options.workers, options.traces)
    print_report(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
