"""Measure what the order of waiting jobs is worth: the daemon's scheduler in simulated clusters.

    python benchmarks/scheduling.py --json figures.json --plot docs/images/scheduling.svg

Every line of what the scheduler promises is a cell: the runs behind it, on public traces and on
made-up workloads, beside baselines after the published rules of others, and the figures drawn from
them with their targets.  Workers, network and clock are simulated; a run depends on its seed alone,
so the machine and what else runs on it change nothing but the time this takes.  Cells may be run
one by one, with --json, and shown together with --from.

How to read the tables
  hit %       prompt tokens that some worker's prefix cache had; `of bound` is that against one
              cache without end, computed from the trace alone.
  TTFT, wait  seconds from a job's arrival to its first token, and until it is dispatched.
  bulk/s      prompt tokens of the batch class that go out in a second while online jobs come.
  median, worst  over the seeds; a figure is met if the worst seed reaches the target.
"""

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from scheduling_cells import CELLS
from scheduling_chart import save_chart
from scheduling_figures import Cell, Figure, Results, Scope
from scheduling_files import as_json, read_results
from scheduling_runs import TRACE_NAMES, TRACES, Outcome, Spec, simulate
from scheduling_tables import figure_table, run_table

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.cli.plot import check_plot_path

#: Share of the jobs that --quick keeps.
QUICK_SCALE = 0.02


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = [cell.name for cell in CELLS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CELL", help=", ".join(names)
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--full", action="store_true", help="the longest runs with every seed too")
    parser.add_argument(
        "--quick", action="store_true", help="2 %% of the jobs and one seed, to see that it works"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="runs made at a time (%(default)s)"
    )
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="directory of Mooncake's traces (%(default)s)"
    )
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="show what --json wrote before, and run nothing",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the chart into this .svg or .png"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.processes < 1:
        parser.error("--seeds and --processes must be 1 or more")
    try:
        check_files(options)
        if options.earlier is not None:
            options.earlier = read_results(options.earlier)
    except ConfigError as error:
        parser.error(error.one_line())
    return options


def check_files(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for files that are missing or cannot be written."""
    for trace in () if options.earlier else TRACE_NAMES:
        if not (file := options.traces / f"{trace}_trace.jsonl").is_file():
            raise ConfigError(f"traces: there is no file {file}", fix="Give --traces DIRECTORY.")
    if options.plot is not None:
        check_plot_path(options.plot)


def main() -> None:
    options = parse_arguments()
    results = measure(options) if options.earlier is None else options.earlier
    cells = [cell for cell in CELLS if cell.name in options.only and cell.name in results]
    figures = {cell.name: cell.figures(results[cell.name]) for cell in cells}
    print_all(cells, results, figures)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "earlier"}
        options.json.write_text(json.dumps(as_json(settings, results, figures), indent=1))
    if options.plot is not None:
        save_chart(options.plot, results)


def measure(options: argparse.Namespace) -> dict[str, Results]:
    """Make the runs of all cells that are asked for."""
    cells = [cell for cell in CELLS if cell.name in options.only]
    seeds = tuple(range(1 if options.quick else options.seeds))
    scope = Scope(seeds, QUICK_SCALE if options.quick else 1.0, options.full)
    plan = {cell.name: [cell.runs(seed, scope) for seed in seeds] for cell in cells}
    specs = dict.fromkeys(
        s for runs in plan.values() for by_label in runs for s in by_label.values()
    )
    outcomes = run_all(specs, options.traces, options.processes)
    return {
        cell.name: Results([{k: outcomes[s] for k, s in runs.items()} for runs in plan[cell.name]])
        for cell in cells
    }


def run_all(specs: Iterable[Spec], traces: Path, num_processes: int) -> dict[Spec, Outcome]:
    """Make each run in a process of its own, the longest ones first."""
    ordered = sorted(specs, key=_length, reverse=True)
    # Spawned ones hash strings with seeds of their own, on which nothing may depend.
    context = multiprocessing.get_context("spawn")
    outcomes = {}
    with (
        _progress() as progress,
        ProcessPoolExecutor(num_processes, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        task = progress.add_task("simulating", total=len(ordered))
        futures: dict[Future[Outcome], Spec] = {
            pool.submit(simulate, spec, traces): spec for spec in ordered
        }
        try:
            for future in as_completed(futures):
                spec = futures[future]
                outcomes[spec] = future.result()
                progress.update(task, advance=1, description=f"{spec.workload}, {spec.policy}")
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return outcomes


def print_all(
    cells: Sequence[Cell],
    results: Mapping[str, Results],
    figures: Mapping[str, Sequence[Figure]],
) -> None:
    """Print the runs of each cell, then all figures."""
    out = Console(highlight=False, width=None if Console().is_terminal else 120)
    for cell in cells:
        out.print(run_table(cell, results[cell.name]))
    out.print(figure_table(cells, figures))
    missed = [f for found in figures.values() for f in found if f.is_met is False]
    asked = [f for found in figures.values() for f in found if f.is_met is not None]
    out.print(f"{len(asked) - len(missed)} of {len(asked)} targets met")


def _length(spec: Spec) -> float:
    """Roughly how long a run takes."""
    return spec.copies * (5 if spec.bulk else 1) * (2 if spec.dies_after else 1)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    main()
