"""Reports of one workload side by side, as a table."""

from collections.abc import Mapping

from rich.table import Table

from tidemill_scheduler.simulation.report import Report

_ONLINE = ("TTFT\np99 s", "TPOT\np50 ms")


def make_table(reports: Mapping[str, Report], *, is_bulk: bool) -> Table:
    """Return a table with a row for each policy, by name; the first one is what others are x of."""
    first = next(iter(reports.values()))
    title = (
        f"{first.workload}: {first.num_jobs:,} jobs, {first.input_tokens:,} prompt tokens,"
        f" {first.num_workers:,} workers"
    )
    table = Table(
        title=title, title_justify="left", caption_justify="left", caption=_caption(first, is_bulk)
    )
    table.add_column("policy", no_wrap=True)
    times = ("makespan\ns", "x", "wait\nmax s") if is_bulk else ("TTFT\nmean s", "x", *_ONLINE)
    for column in ("hit %", "% of\nbound", *times, "busiest\n/ mean"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, report in reports.items():
        table.add_row(name, *_cells(report, first, is_bulk=is_bulk))
    return table


def _cells(report: Report, first: Report, *, is_bulk: bool) -> list[str]:
    shares = [f"{report.hit_share * 100:.2f}", f"{report.share_of_bound * 100:.1f}"]
    if is_bulk:
        times = [
            _short(report.makespan),
            _ratio(report.makespan, first.makespan),
            _short(report.wait.max),
        ]
    else:
        times = [
            _short(report.ttft.mean),
            _ratio(report.ttft.mean, first.ttft.mean),
            _short(report.ttft.p99),
            _short(report.tpot.p50 * 1000),
        ]
    return [*shares, *times, f"{report.imbalance:.3f}"]


def _short(value: float) -> str:
    """Write four digits, or all before the point, so that nine columns fit into 80 characters."""
    decimals = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{decimals}f}"


def _ratio(value: float, basis: float) -> str:
    return f"{value / basis:.2f}" if basis else "-"


def _caption(report: Report, is_bulk: bool) -> str:
    return (
        f"An endless cache would find {report.bound_share * 100:.2f} % of the prompt tokens."
        f"  x: {'makespan' if is_bulk else 'mean TTFT'} against the first row."
        "  busiest / mean: busy time of workers."
    )
