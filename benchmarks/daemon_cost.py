"""Measure what the daemon's decisions cost: the whole scheduler, the order of bulk jobs, memory.

    python benchmarks/daemon_cost.py --jobs 1000 10000 100000 --json figures.json

For each number of waiting jobs the order is filled and then, in each repeat, every operation is
timed between two runs of a calibration loop: a fixed mix of the interpreter's own bisections, list
and dict operations and slices.

How to read the table
  us          microseconds of processor time for one operation on this machine, median
  rounds      the same in rounds of the calibration loop, median. It hardly depends on the machine
              or on what else it does: compare this one.
  arrival     a job begins to wait in the scheduler, whatever lane that puts it in
  decision    a job is chosen for a worker and sent, of about ten at a time
  status      a worker's report takes it from what is under way to what is done
  KV hash     one routing hash that a worker tells to be in its cache
  tick p99    a whole tick, the slowest of a hundred
  add         a job begins to wait in the order of bulk jobs while an epoch runs
  take+peek   a worker looks at its next job, takes it and looks at the one behind it
  remove      a waiting job is cancelled
  epoch       an epoch begins, all workers are given places and one its range
  steal       a worker without a range takes half of another's, which may have to be cut first
Memory is what a process of its own grows by when it reads that many jobs and lets them wait.
"""

import argparse
import gc
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any, Protocol

from daemon_jobs import TOKENS_PER_HASH, JobSource
from rich.console import Console
from rich.table import Table
from scheduler_costs import SchedulerCosts, Timing, make_scheduler

from tidemill_scheduler.__main__ import GC_THRESHOLDS
from tidemill_scheduler.policy.prefix_order import PrefixOrder

#: Operations timed together, where one alone is too short.
BATCH = 500
_ROUNDS = 2000


@dataclass(frozen=True, slots=True)
class Sample:
    """Processor seconds that one operation took, and one round of calibration beside it."""

    seconds: float
    round_seconds: float

    @property
    def rounds(self) -> float:
        """The operation in rounds of calibration."""
        return self.seconds / self.round_seconds


class Calibration:
    """A fixed piece of work for the interpreter, about a microsecond a round."""

    def __init__(self) -> None:
        source = random.Random(0)
        self._keys = sorted(source.randbytes(80) for _ in range(512))
        self._probes = [source.randbytes(80) for _ in range(64)]

    def round_seconds(self) -> float:
        """Run the loop; return the processor seconds of one round."""
        keys, seen, total = list(self._keys), dict[bytes, int](), 0
        began = process_time()
        for number in range(_ROUNDS):
            probe = self._probes[number % 64]
            place = bisect_left(keys, probe)
            keys.insert(place, probe)
            seen[probe] = number
            total += probe[8:16] == keys[place - 1][8:16]
            del keys[place]
            total += seen.pop(probe)
        return (process_time() - began) / _ROUNDS


class Costs(Protocol):
    """Something that is measured."""

    def timings(self) -> Iterator[Timing]:
        """Do each operation once, or often enough to be timed."""


class OrderCosts:
    """The operations of a ``PrefixOrder`` in which ``num_jobs`` wait for ``num_workers``."""

    title = "order of bulk jobs"

    def __init__(self, num_jobs: int, num_workers: int, num_hashes: int) -> None:
        source = JobSource(num_jobs, num_hashes)
        self._jobs = source.take(num_jobs)
        self._newcomers = source.take(min(BATCH, num_jobs))
        self._workers = [f"worker-{number}" for number in range(num_workers)]
        self._firsts = JobSource(num_workers, num_hashes, seed=2).take(2 * num_workers)

    def timings(self) -> Iterator[Timing]:
        """Fill a new order and do each operation in it."""
        order = self._filled_order()
        yield self._add(order)
        yield self._remove(order)
        for job in self._firsts:
            if job.job_id in order:
                order.remove(job.job_id)
        yield self._begin_epoch(order)
        yield self._take(order)
        yield self._steal(order)

    def _filled_order(self) -> PrefixOrder:
        """An order in which an epoch runs with one job a worker, and all jobs wait for the next."""
        order = PrefixOrder(self._workers, TOKENS_PER_HASH)
        for job in self._firsts:
            order.add(job)
        for worker in self._workers:
            if first := order.peek(worker):
                order.take(first, worker)
        for job in self._jobs:
            order.add(job)
        return order

    def _begin_epoch(self, order: PrefixOrder) -> Timing:
        began = process_time()
        order.peek(self._workers[0])
        return Timing("epoch", process_time() - began, 1)

    def _add(self, order: PrefixOrder) -> Timing:
        began = process_time()
        for job in self._newcomers:
            order.add(job)
        return Timing("add", process_time() - began, len(self._newcomers))

    def _take(self, order: PrefixOrder) -> Timing:
        ready = [worker for worker in self._workers if order.peek(worker)]
        turns = (ready * (BATCH // len(ready) + 1))[: min(BATCH, len(self._jobs) // 4)]
        taken = 0
        began = process_time()
        for worker in turns:
            job = order.peek(worker)
            if job is not None:
                order.take(job, worker)
                order.peek(worker)
                taken += 1
        return Timing("take+peek", process_time() - began, taken)

    def _remove(self, order: PrefixOrder) -> Timing:
        began = process_time()
        for job in self._newcomers:
            order.remove(job.job_id)
        return Timing("remove", process_time() - began, len(self._newcomers))

    def _steal(self, order: PrefixOrder) -> Timing:
        thieves = [f"thief-{number}" for number in range(min(20, len(self._jobs) // 50))]
        began = process_time()
        found = [order.claim_range(thief, _always) for thief in thieves]
        seconds = process_time() - began
        assert all(found)
        return Timing("steal", seconds, len(thieves))


def _always(owner: str) -> bool:
    return True


def measure_memory(num_jobs: int, num_hashes: int) -> dict[str, float]:
    """Let jobs wait in a process of their own; return its growth and what that is a job."""
    command = [sys.executable, __file__, "--memory-child", str(num_jobs), str(num_hashes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(done.stdout)
    return {"jobs": num_jobs, "hashes": num_hashes, "bytes": grown, "per_job": grown / num_jobs}


def print_growth(num_jobs: int, num_hashes: int) -> None:
    """The child's part: fill a scheduler and print by how many bytes this process grew."""
    source = JobSource(num_jobs, num_hashes)
    before = resident_bytes()
    scheduler = make_scheduler(1)
    for job in source.jobs(num_jobs):
        scheduler.add_job(job)
    print(resident_bytes() - before)


def resident_bytes() -> int:
    """The memory of this process that is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(costs: Costs, calibration: Calibration, repeat: int) -> dict[str, Any]:
    """Time everything ``repeat`` times, calibrated before and after; return medians."""
    samples: dict[str, list[Sample]] = {}
    for _ in range(repeat):
        before = calibration.round_seconds()
        for timing in costs.timings():
            after = calibration.round_seconds()
            sample = Sample(timing.seconds / timing.count, (before + after) / 2)
            samples.setdefault(timing.name, []).append(sample)
            before = after
    return {name: medians(runs) for name, runs in samples.items()}


def medians(runs: Sequence[Sample]) -> dict[str, Any]:
    """The middle of the runs of one operation, and all of them."""
    return {
        "us": statistics.median(run.seconds for run in runs) * 1e6,
        "rounds": statistics.median(run.rounds for run in runs),
        "runs": [run.rounds for run in runs],
    }


def print_report(out: Console, figures: dict[str, Any]) -> None:
    """Print a table of the operations, and the memory."""
    for title, key in (
        (SchedulerCosts.title, "scheduler"),
        (f"{OrderCosts.title}, {figures['workers']} workers", "costs"),
    ):
        print_table(out, title, figures[key])
    if memory := figures["memory"]:
        what = f"{memory['jobs']:,} waiting jobs with {8 * memory['hashes']} B keys"
        out.print(f"{what}: {memory['bytes'] / 1e6:,.0f} MB, {memory['per_job']:,.0f} B each")


def print_table(out: Console, title: str, figures: dict[str, Any]) -> None:
    """Print the operations of one thing for each number of jobs."""
    table = Table(title=title)
    table.add_column("waiting jobs", justify="right")
    for column in ("operation", "us", "rounds"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for num_jobs, costs in figures.items():
        for name, cost in costs.items():
            row = (f"{int(num_jobs):,}", name, f"{cost['us']:,.1f}", f"{cost['rounds']:,.1f}")
            table.add_row(*row, end_section=name == list(costs)[-1])
    out.print(table)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="jobs that wait")
    add("--workers", type=int, default=1_000, help="workers of the model (%(default)s)")
    add("--hashes", type=int, default=100, help="routing hashes of a key (%(default)s)")
    add("--repeat", type=int, default=5, help="repeats, for medians (%(default)s)")
    add("--memory-jobs", type=int, default=1_000_000, help="0 leaves memory out (%(default)s)")
    add("--memory-hashes", type=int, default=25, help="hashes of their keys (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every run to FILE")
    add("--memory-child", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    if options.memory_child:
        print_growth(*options.memory_child)
        return
    # As in the daemon: else the slowest ticks are those in which all jobs are looked through.
    gc.set_threshold(*GC_THRESHOLDS)
    calibration = Calibration()
    costs, scheduler = {}, {}
    for num_jobs in options.jobs:
        scheduler_costs = SchedulerCosts(num_jobs, options.hashes)
        scheduler[str(num_jobs)] = measure(scheduler_costs, calibration, options.repeat)
        order_costs = OrderCosts(num_jobs, options.workers, options.hashes)
        costs[str(num_jobs)] = measure(order_costs, calibration, options.repeat)
    memory = (
        measure_memory(options.memory_jobs, options.memory_hashes) if options.memory_jobs else {}
    )
    figures = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "workers": options.workers,
        "hashes": options.hashes,
        "scheduler": scheduler,
        "costs": costs,
        "memory": memory,
    }
    print_report(Console(), figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
