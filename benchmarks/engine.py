"""Measure the engine in one process, without the queue, beside transformers' batched generate.

    python benchmarks/engine.py --workloads W1 W4 --repeat 3 --json figures.json

All requests of a workload arrive at once and are greedy, with ``ignore_eos`` and token-id prompts
from a fixed seed, so that every system does the same work. Systems take turns, and medians of
the repeats are shown.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workloads import TITLES

from tidemill.service.config import load_config
from tidemill_gpuworker.demo.demo_model import demo_model_dir

MEASURE = Path(__file__).with_name("measure.py")
#: Where the prompts have one length, so that a padded batch is no handicap.
BASELINE_WORKLOADS = ("W1",)
COLUMNS = (
    "output\ntok/s",
    "total\ntok/s",
    "TTFT p50\nms",
    "TTFT p99\nms",
    "TPOT p50\nms",
    "peak RSS\nGB",
)

Runs = dict[tuple[str, str], list[dict[str, Any]]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--model", type=Path, help="model directory (the demo model)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32 (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-baseline", action="store_true", help="leave out transformers")
    parser.add_argument("--max-num-batched-tokens", type=int, help="the worker's default")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=2 << 30, help="(2 GiB)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to FILE")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace, model_dir: Path, console: Console) -> Runs:
    """Measure every cell ``repeat`` times, systems by turns."""
    runs: Runs = {}
    for workload in options.workloads:
        systems = ["tidemill"]
        if workload in BASELINE_WORKLOADS and not options.no_baseline:
            systems.append("transformers")
        for number in range(options.repeat):
            for system in systems:
                console.print(f"{workload} {system} {number + 1}/{options.repeat}", style="dim")
                run = measure(options, model_dir, system, workload)
                runs.setdefault((workload, system), []).append(run)
    return runs


def measure(
    options: argparse.Namespace, model_dir: Path, system: str, workload: str
) -> dict[str, Any]:
    """Run one measurement in its own process."""
    command = [sys.executable, str(MEASURE), system, workload, "--model", str(model_dir)]
    for name in ("device", "dtype", "threads", "seed", "kv_cache_memory_bytes"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.max_num_batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def make_table(runs: Runs, options: argparse.Namespace) -> Table:
    """Return the medians, one row a workload and system."""
    table = Table(title=f"{options.dtype}, {options.threads} threads, median of {options.repeat}")
    table.add_column("", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for (workload, system), cell in runs.items():
        table.add_row(workload, system, *_row(cell))
    table.caption = "\n".join(f"{name}: {TITLES[name]}" for name in options.workloads)
    return table


def output_rate(cell: list[dict[str, Any]]) -> float:
    """Return the median of output tokens per second."""
    return _median_of([run["num_output_tokens"] / run["seconds"] for run in cell])


def compare(runs: Runs) -> list[str]:
    """Say how much faster the engine is, where both were measured."""
    lines = []
    for workload in BASELINE_WORKLOADS:
        ours, theirs = runs.get((workload, "tidemill")), runs.get((workload, "transformers"))
        if ours and theirs:
            ratio = output_rate(ours) / output_rate(theirs)
            cpu = _median(theirs, "cpu_seconds") / _median(ours, "cpu_seconds")
            lines.append(
                f"{workload}: {ratio:.2f} times the output tokens per second of transformers"
                f" generate, {cpu:.2f} times per CPU second"
            )
    return lines


def _row(cell: list[dict[str, Any]]) -> list[str]:
    total = _median_of(
        [(run["num_prompt_tokens"] + run["num_output_tokens"]) / run["seconds"] for run in cell]
    )
    times = [_milliseconds(cell, name) for name in ("ttft_p50", "ttft_p99", "tpot_p50")]
    peak = max(run["peak_rss_bytes"] for run in cell) / 1e9
    return [f"{output_rate(cell):,.0f}", f"{total:,.0f}", *times, f"{peak:.2f}"]


def _milliseconds(cell: list[dict[str, Any]], name: str) -> str:
    return "-" if cell[0][name] is None else f"{1000 * _median(cell, name):,.0f}"


def _median(cell: list[dict[str, Any]], name: str) -> float:
    return _median_of([run[name] for run in cell])


def _median_of(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    options = parse_arguments()
    console = Console(stderr=True)
    model_dir = options.model or demo_model_dir(load_config().cache_dir)
    runs = run_all(options, model_dir, console)
    out = Console()
    out.print(make_table(runs, options))
    for line in compare(runs):
        out.print(line)
    if options.json is not None:
        cells = [{"workload": w, "system": s, "runs": cell} for (w, s), cell in runs.items()]
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "cells": cells}, indent=2))


if __name__ == "__main__":
    main()
