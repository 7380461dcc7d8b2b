"""Measure the queue: what each Redis Function costs, beside plain commands of the same bytes.

    python benchmarks/queue_bench.py --levels everysec --repeat 5 --json figures.json

Starts its own server for each durability level: none (no append-only file), everysec and always
(appendfsync).  In every repeat the same jobs are submitted, dispatched, given chunks, renewed and
finished, and right beside each stage the plain pipeline that would carry the same bytes is sent
over the same connection, first one and then the other by turns.

How to read the table
  per CPU s   operations for one second of the server's CPU (INFO cpu, user and system, all
              threads). It hardly depends on what else the machine does: compare this one.
  per s       operations per second of wall time with one client and 256 in flight.
  plain       the same for the plain pipeline; "ratio" is ours over plain per CPU second.
Rows "append xN" write chunks of 160 B of N jobs with each call.  All figures are medians.
"""

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
from queue_figures import measure_latency, measure_memory, measure_publishing
from queue_meter import LEVELS, Sample, Server, find_tool, run_tool, start_server
from queue_stages import MAX_PER_CALL, PER_TRIP, JobSet, Stage, make_chunk, make_request, prepare
from queue_table import check_targets, print_report
from rich.console import Console

from tidemill.protocol.codec import encode

JOBS_PER_CALL = (1, 64, 256)

Samples = dict[str, list[tuple[Sample, Sample]]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument(
        "--jobs", type=_num_jobs, default=4096, help="jobs a repeat, in steps of 256 (%(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="repeats, for medians (%(default)s)")
    parser.add_argument(
        "--singles", type=int, default=2000, help="submits one by one (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="engine steps (%(default)s)")
    parser.add_argument("--data-dir", type=Path, help="on which disk (the temporary directory)")
    parser.add_argument("--no-tool", action="store_true", help="leave out redis-benchmark")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to FILE")
    return parser.parse_args(arguments)


def measure_level(options: argparse.Namespace, level: str, console: Console) -> dict[str, Any]:
    """Measure everything on one server of a durability level."""
    with (
        tempfile.TemporaryDirectory(dir=options.data_dir, prefix="tidemill-bench-") as directory,
        start_server(Path(directory), level) as server,
    ):
        samples: Samples = {}
        tools: dict[str, list[Sample]] = {}
        others: dict[str, list[dict[str, float]]] = {}
        for number in range(options.repeat):
            console.print(f"{level} {number + 1}/{options.repeat}", style="dim")
            run_stages(server, options.jobs, number, samples)
            if not options.no_tool:
                run_tools(server, options.jobs, tools)
            for name, figures in measure_others(server, options).items():
                others.setdefault(name, []).append(figures)
        return {
            "server": server.version,
            "stages": {name: stage_figures(pairs) for name, pairs in samples.items()},
            "tools": {name: _rates(runs) for name, runs in tools.items()},
            **{name: _medians(runs) for name, runs in others.items()},
        }


def measure_others(server: Server, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure once what is no rate."""
    return {
        "latency": measure_latency(server, options.singles),
        "memory": measure_memory(server, options.jobs),
        "streamed": measure_publishing(server, options.steps, stream=True),
        "quiet": measure_publishing(server, options.steps, stream=False),
    }


def run_stages(server: Server, num_jobs: int, number: int, samples: Samples) -> None:
    """Take a set of jobs through its life; adds (ours, plain) of each stage to ``samples``."""
    server.empty()
    epoch = prepare(server.client)
    jobs = JobSet(num_jobs)

    def measure(stage: Stage) -> None:
        if number % 2:
            plain, ours = stage.run_plain(server), stage.run_calls(server)
        else:
            ours, plain = stage.run_calls(server), stage.run_plain(server)
        samples.setdefault(stage.name, []).append((ours, plain))

    measure(jobs.submit())
    measure(jobs.dispatch(server.client, epoch))
    for per_call in JOBS_PER_CALL:
        measure(jobs.append(per_call))
    measure(jobs.beat())
    measure(jobs.finish())


def run_tools(server: Server, num: int, tools: dict[str, list[Sample]]) -> None:
    """Let the servers' own load generator add entries of the same sizes, if it is there."""
    tool = find_tool()
    if tool is None:
        return
    for size in (len(encode(make_request())), len(encode(make_chunk(0)))):
        command = ["XADD", "plain:tool", "*", "d", "x" * size]
        sample = run_tool(server, tool, command, num, PER_TRIP)
        tools.setdefault(f"{Path(tool).name} XADD {size} B", []).append(sample)


def stage_figures(pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, Any]:
    """Medians of a stage and of its plain pipeline, and of the ratio in each repeat."""
    ratios = [ours.per_cpu_second / plain.per_cpu_second for ours, plain in pairs]
    return {
        **_rates([ours for ours, _ in pairs]),
        "plain": _rates([plain for _, plain in pairs]),
        "ratio": statistics.median(ratios),
    }


def _rates(runs: Sequence[Sample]) -> dict[str, Any]:
    return {
        "per_cpu_second": statistics.median(run.per_cpu_second for run in runs),
        "per_second": statistics.median(run.per_second for run in runs),
        "runs": [run.per_cpu_second for run in runs],
    }


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _num_jobs(text: str) -> int:
    num = int(text)
    if num < MAX_PER_CALL or num % MAX_PER_CALL:
        raise argparse.ArgumentTypeError(f"{num} is not a multiple of {MAX_PER_CALL}")
    return num


def main() -> None:
    options = parse_arguments()
    console = Console(stderr=True)
    levels = {level: measure_level(options, level, console) for level in options.levels}
    targets = check_targets(levels)
    print_report(Console(), levels, targets)
    if options.json is not None:
        conditions = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "redis-py": redis.__version__,
            "machine": platform.machine(),
        }
        settings = {key: str(value) for key, value in vars(options).items()}
        figures = {
            "settings": settings,
            "conditions": conditions,
            "levels": levels,
            "targets": targets,
        }
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
