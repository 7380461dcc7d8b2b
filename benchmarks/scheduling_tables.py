"""The tables of the scheduling benchmark."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from scheduling_figures import Cell, Figure, Results
from scheduling_runs import Outcome

from tidemill_scheduler.simulation.report import ClassReport

_Column = tuple[str, Callable[[Outcome], float], str]

_COMMON: tuple[_Column, ...] = (
    ("hit %", lambda o: 100 * o.report.hit_share, ".2f"),
    ("of bound", lambda o: 100 * o.report.share_of_bound, ".2f"),
    ("makespan s", lambda o: o.report.makespan, ".1f"),
)
_BULK: tuple[_Column, ...] = (
    ("tokens/s", lambda o: o.report.tokens_per_second, ",.0f"),
    ("longest wait s", lambda o: o.report.wait.max, ".1f"),
    ("imbalance", lambda o: o.report.imbalance, ".3f"),
)
# Of the best class, which is the online one if there are two.
_ONLINE: tuple[_Column, ...] = (
    ("TTFT mean s", lambda o: _first_class(o).ttft.mean, ".2f"),
    ("p99", lambda o: _first_class(o).ttft.p99, ".2f"),
    ("longest wait s", lambda o: _first_class(o).wait.max, ".1f"),
    ("TPOT p50 ms", lambda o: 1000 * _first_class(o).tpot.p50, ".0f"),
    ("bulk/s", lambda o: o.bulk_rate, ",.0f"),
)
_WALL: tuple[_Column, ...] = (("took s", lambda o: o.wall_seconds, ".0f"),)

_VERDICTS = {None: "", True: "met", False: "[bold red]MISSED[/]"}


def run_table(cell: Cell, results: Results) -> Table:
    """Return the runs of a cell, each the median over the seeds."""
    columns = _COMMON + (_ONLINE if cell.is_online else _BULK) + _WALL
    table = Table(title=f"{cell.name}: {cell.title}", title_justify="left")
    table.add_column("run")
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for label in results.labels:
        outcomes = results.outcomes(label)
        cells = [
            format(statistics.median(measure(o) for o in outcomes), form)
            for _, measure, form in columns
        ]
        table.add_row(label, *cells)
    return table


def figure_table(cells: Sequence[Cell], figures: Mapping[str, Sequence[Figure]]) -> Table:
    """Return all figures with their targets."""
    table = Table(title="figures", title_justify="left")
    for title in ("cell", "figure", "unit"):
        table.add_column(title)
    for title in ("target", "median", "worst", "seeds", ""):
        table.add_column(title, justify="right")
    for cell in cells:
        for figure in figures[cell.name]:
            table.add_row(cell.name, *_row(figure))
        table.add_section()
    return table


def _row(figure: Figure) -> tuple[str, ...]:
    return (
        figure.what,
        figure.unit,
        figure.target,
        _number(figure.median),
        # Without a target no direction is the worse one.
        _number(figure.worst) if figure.target else "",
        str(len(figure.values)),
        _VERDICTS[figure.is_met],
    )


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _first_class(outcome: Outcome) -> ClassReport:
    return min(outcome.report.by_class.items())[1]
