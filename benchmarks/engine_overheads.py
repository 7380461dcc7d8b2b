"""Print what the engine's memory tricks cost and save, as ratios within this run.

    python benchmarks/engine_overheads.py --repeat 7 --json figures.json

caching  prefix caching where no prefix is ever found: CPU time of a step on the real model, and how
         much of it is due to caching, measured in two ways: *inside*, the time within hashing,
         lookup and registration; *around*, by how much a step's bookkeeping, without a model, takes
         longer with caching than without. *whole runs*: all CPU time with it to that without.
         Old blocks are evicted all the time in the prefill workload.
blocks   the native CPU kernel over a block table: the same keys and values in scattered blocks, in
         blocks in order, and in one block a sequence, to which the others are ratios; and what
         torch's attention takes without any table, for orientation. *lookups*: the same bytes read
         through a table and without, which is what the table itself costs (a KV head as a sequence
         of its own: its blocks in order lie in memory as one block does).
hits     the time to the first token with 80 % of a prompt in the prefix cache, beside the same
         prompt cold.

In each repeat all that is compared runs one right behind the other, in changing order. Shown are
medians, with the quartiles of ratios in brackets.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence as Many
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before torch loads its OpenMP runtime: idle threads that spin starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from overheads_blocks import CASES, LAYOUTS, BlockCosts, measure_blocks
from overheads_caching import WORKLOADS, CachingCosts, measure_caching
from overheads_hits import HIT_SHARE, PROMPTS, HitCosts, measure_hits
from overheads_model import ServedAgain, Settings, load
from rich.console import Console
from rich.table import Table

from tidemill.service.config import load_config
from tidemill_gpuworker.demo.demo_model import demo_model_dir

_WIDTH = 110
PARTS = ("caching", "blocks", "hits")
#: Issue 5's limits: a share of the step, a share of attention, a share of the first token's time.
MOST_CACHING, MOST_TABLE, LEAST_SAVED = 0.01, 0.05, 0.6

Figures = dict[str, list[Any]]


def parse_arguments(arguments: Many[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--model", type=Path, help="model directory (the demo model)")
    parser.add_argument("--dtype", default="bfloat16", help="or float32 (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="of the table (%(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--rows", type=int, help="only so many rows of each table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Return what each part found, row by row."""
    torch.set_num_threads(options.threads)
    figures: Figures = {}
    if "blocks" in options.only:
        dtype = getattr(torch, options.dtype)
        figures["blocks"] = [
            measure_blocks(case, dtype, options.block_size, options.repeat)
            for case in CASES[: options.rows]
        ]
    if {"caching", "hits"} & {*options.only}:
        figures |= _measure_model(options)
    return figures


def _measure_model(options: argparse.Namespace) -> Figures:
    model_dir = options.model or demo_model_dir(load_config().cache_dir)
    model: ServedAgain = load(Settings(model_dir, options.dtype, options.threads))
    figures: Figures = {}
    if "caching" in options.only:
        figures["caching"] = [
            measure_caching(model, workload, options.repeat)
            for workload in WORKLOADS[: options.rows]
        ]
    if "hits" in options.only:
        figures["hits"] = [
            measure_hits(model, prompts, options.repeat) for prompts in PROMPTS[: options.rows]
        ]
    return figures


def caching_table(rows: list[CachingCosts]) -> Table:
    """Return the table of the first part."""
    table = _table(
        f"Prefix caching without a hit (at most {MOST_CACHING:.0%} of the step)",
        *("a step", "inside", "around", "share", "whole runs"),
    )
    for row in rows:
        table.add_row(
            row.title,
            f"{1e3 * row.step:,.1f} ms",
            f"{1e6 * row.inside:,.1f} us",
            f"{1e6 * row.around:,.1f} us",
            f"{row.share:.3%}",
            _spread(row.ratios),
        )
    return table


def blocks_table(rows: list[BlockCosts], block_size: int) -> Table:
    """Return the table of the second part."""
    table = _table(
        f"Attention over blocks of {block_size} (lookups at most {1 + MOST_TABLE})",
        *("context", "lookups", *LAYOUTS),
    )
    for row in rows:
        plain = f"{1e6 * row.seconds:,.0f} us"
        ratios = [_spread(row.ratios[layout]) for layout in LAYOUTS[1:]]
        table.add_row(row.title, f"{row.context:,}", _spread(row.lookups), plain, *ratios)
    return table


def hits_table(rows: list[HitCosts]) -> Table:
    """Return the table of the third part."""
    table = _table(
        f"{HIT_SHARE:.0%} of the prompt cached (at least {LEAST_SAVED:.0%} sooner)",
        *("TTFT cold", "TTFT cached", "sooner", "CPU time", "same token"),
    )
    for row in rows:
        table.add_row(
            row.title,
            f"{1e3 * statistics.median(row.cold):,.0f} ms",
            f"{1e3 * statistics.median(row.warm):,.0f} ms",
            f"{row.saved:.1%}",
            f"-{row.saved_cpu:.1%}",
            f"{row.num_same} of {row.num_prompts}",
        )
    return table


def verdicts(figures: Figures) -> list[str]:
    """Say of each part whether its worst row keeps the limit."""
    lines = []
    if rows := figures.get("caching"):
        worst = max(row.share for row in rows)
        lines.append(f"prefix caching at 0 % hits: {worst:.3%} {_kept(worst < MOST_CACHING)}")
    if rows := figures.get("blocks"):
        worst = max(statistics.median(row.lookups) for row in rows) - 1
        lines.append(f"lookups in the block table: {worst:+.1%} {_kept(worst < MOST_TABLE)}")
        scatter = max(row.scatter for row in rows) - 1
        lines.append(f"scattered beside in order, worst row: {scatter:+.1%}")
        blocks = max(row.ratio("scattered") for row in rows) - 1
        lines.append(f"blocks beside one block a sequence, worst row: {blocks:+.1%}")
    if rows := figures.get("hits"):
        least = min(row.saved for row in rows)
        lines.append(f"first token at 80 % hits: -{least:.1%} {_kept(least >= LEAST_SAVED)}")
    return lines


def _kept(is_kept: bool) -> str:
    return "in the worst row: limit kept" if is_kept else "in the worst row: LIMIT MISSED"


def _spread(ratios: list[float]) -> str:
    middle = statistics.median(ratios)
    if len(ratios) < 2:
        return f"{middle:.3f}"
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main() -> None:
    options = parse_arguments()
    figures = measure(options)
    console = Console()
    # Not to be cut where the output goes to a file.
    console.width = max(console.width, _WIDTH)
    if "caching" in figures:
        console.print(caching_table(figures["caching"]))
    if "blocks" in figures:
        console.print(blocks_table(figures["blocks"], options.block_size))
    if "hits" in figures:
        console.print(hits_table(figures["hits"]))
    for line in verdicts(figures):
        console.print(line, highlight=False)
    if options.json is not None:
        rows = {part: [asdict(row) for row in found] for part, found in figures.items()}
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
