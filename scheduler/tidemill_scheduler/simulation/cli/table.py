"""Reports of one workload side by side, as a table."""

from collections.abc import Mapping

from rich.table import Table

from tidemill_scheduler.simulation.report import Report


def make_table(reports: Mapping[str, Report], *, is_bulk: bool) -> Table:
    """Return a table with a row for each policy, by name; the first one is what others are x of."""
    first = next(iter(reports.values()))
    title = (
        f"{first.workload}: {first.num_jobs:,} jobs, {first.input_tokens:,} prompt tokens,"
        f" {first.num_workers:,} workers"
    )
    table = Table(
        title=title, title_justify="left", caption_justify="left", caption=_caption(first)
    )
    table.add_column("policy", no_wrap=True)
    for column in ("hit %", "of bound %", "makespan s", "x"):
        table.add_column(column, justify="right")
    for column in ("wait max s",) if is_bulk else ("TTFT mean s", "TTFT p99 s", "TPOT p50 ms"):
        table.add_column(column, justify="right")
    table.add_column("imbalance", justify="right")
    for name, report in reports.items():
        table.add_row(name, *_cells(report, first, is_bulk=is_bulk))
    return table


def _cells(report: Report, first: Report, *, is_bulk: bool) -> list[str]:
    basis = report.makespan / first.makespan if is_bulk else report.ttft.mean / first.ttft.mean
    times = (
        [f"{report.wait.max:.1f}"]
        if is_bulk
        else [
            f"{report.ttft.mean:.3f}",
            f"{report.ttft.p99:.2f}",
            f"{report.tpot.p50 * 1000:.1f}",
        ]
    )
    return [
        f"{report.hit_share * 100:.2f}",
        f"{report.share_of_bound * 100:.2f}",
        f"{report.makespan:.1f}",
        f"{basis:.2f}",
        *times,
        f"{report.imbalance:.3f}",
    ]


def _caption(report: Report) -> str:
    return (
        f"An endless cache would find {report.bound_share * 100:.2f} % of the prompt tokens."
        "  x: makespan, or online the mean TTFT, against the first row."
    )
