"""How the queue's figures are shown, and what they are held against."""

from collections.abc import Mapping
from typing import Any

from queue_stages import PLAIN_TITLES
from rich.console import Console
from rich.table import Table

#: (level, what, path to the figure, bound, whether more is better).
TARGETS = (
    ("everysec", "submits per CPU second", ("stages", "submit", "per_cpu_second"), 5_000, True),
    (
        "everysec",
        "chunks per CPU second",
        ("stages", "append x256", "per_cpu_second"),
        20_000,
        True,
    ),
    ("always", "submits per CPU second", ("stages", "submit", "per_cpu_second"), 2_000, True),
    ("always", "chunks per CPU second", ("stages", "append x256", "per_cpu_second"), 10_000, True),
    ("everysec", "submit p50 ms", ("latency", "submit_p50_ms"), 1.0, False),
    ("everysec", "submit p99 ms", ("latency", "submit_p99_ms"), 10.0, False),
    ("always", "submit p99 ms", ("latency", "submit_p99_ms"), 25.0, False),
    ("everysec", "share of a 50 ms step, streamed", ("streamed", "share"), 0.02, False),
    ("everysec", "share of a 50 ms step, not streamed", ("quiet", "share"), 0.02, False),
)


def check_targets(levels: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hold the levels that were measured against their targets."""
    verdicts = []
    for level, what, path, bound, more_is_better in TARGETS:
        if level in levels:
            value = levels[level]
            for name in path:
                value = value[name]
            met = value >= bound if more_is_better else value <= bound
            verdicts.append(
                {"level": level, "what": what, "value": value, "target": bound, "met": met}
            )
    return verdicts


def print_report(out: Console, levels: Mapping[str, Any], targets: list[dict[str, Any]]) -> None:
    """Print one table a level, the figures beside it, and the targets."""
    for name, title in PLAIN_TITLES.items():
        out.print(f"plain {name}: {title}", highlight=False)
    for level, figures in levels.items():
        out.print(make_table(level, figures))
        for line in describe(figures):
            out.print(line, highlight=False)
        out.print()
    for verdict in targets:
        word = "met" if verdict["met"] else "MISSED"
        out.print(
            f"{verdict['level']}: {verdict['what']} {_short(verdict['value'])},"
            f" target {_short(verdict['target'])}: {word}",
            highlight=False,
        )


def make_table(level: str, figures: Mapping[str, Any]) -> Table:
    """Return the rates of a level, one row a function and one a run of the load generator."""
    table = Table(title=f"{figures['server']}, append-only file: {level}", title_justify="left")
    table.add_column("")
    for column in ("per\nCPU s", "per s", "plain per\nCPU s", "plain\nper s", "ratio"):
        table.add_column(column, justify="right", no_wrap=True, min_width=5)
    for name, stage in figures["stages"].items():
        plain = stage["plain"]
        rates = (stage["per_cpu_second"], stage["per_second"])
        beside = (plain["per_cpu_second"], plain["per_second"])
        cells = [f"{rate:,.0f}" for rate in (*rates, *beside)]
        table.add_row(name, *cells, f"{stage['ratio']:.2f}")
    for name, rates in figures["tools"].items():
        cells = [f"{rates[key]:,.0f}" for key in ("per_cpu_second", "per_second")]
        table.add_row(name, "", "", *cells, "")
    return table


def describe(figures: Mapping[str, Any]) -> list[str]:
    """Say in words what is no rate."""
    latency, memory = figures["latency"], figures["memory"]
    return [
        f"submit, one at a time: p50 {latency['submit_p50_ms']:.2f} ms,"
        f" p99 {latency['submit_p99_ms']:.2f} ms",
        f"bytes per job with a 2 kB prompt: waiting {memory['queued_bytes']:,.0f},"
        f" running with 10 chunks {memory['running_bytes']:,.0f},"
        f" ended {memory['ended_bytes']:,.0f}",
        *(_describe_step(name, figures[name]) for name in ("streamed", "quiet")),
    ]


def _describe_step(name: str, step: Mapping[str, float]) -> str:
    kind = {"streamed": "flushed every step", "quiet": "not streamed, flushed every 0.5 s"}[name]
    return (
        f"256 sequences, 50 ms a step, {kind}: server {step['server_us_per_token']:.1f} us and"
        f" publisher {step['publisher_us_per_token']:.1f} us a token ="
        f" {100 * step['server_share']:.1f} % + {100 * step['publisher_share']:.1f} % of the step"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
