"""The chart of the scheduling benchmark: hit rates, makespans and waiting under overload."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scheduling_figures import Results

from tidemill_scheduler.simulation.policies import POLICIES
from tidemill_scheduler.simulation.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _THEIRS = "tab:blue", "tab:gray"


def save_chart(path: Path, results: Mapping[str, Results]) -> None:
    """Draw what was measured of the cells "policies", "rag", "cache" and "overload"."""
    from matplotlib import rc_context  # an extra, and slow to load
    from matplotlib.figure import Figure

    # Ids inside would be random otherwise, and the date is left out, so that a run repeats a file.
    # Letters as outlines would be most of it.
    with rc_context({"svg.hashsalt": "tidemill", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 6.4), layout="constrained")
        axes = figure.subplots(2, 2)
        bars = [bar for trace in ("conversation", "synthetic") for bar in _hits(results, trace)]
        _draw(axes[0][0], bars, "Traces as bulk: tokens found in a cache, %")
        makespans = _values(results, "rag", lambda report: report.makespan)
        _draw(axes[0][1], makespans, "Questions on long documents: makespan, s")
        hits = _values(results, "cache", lambda report: 100 * report.hit_share)
        _draw(axes[1][0], hits, "A tenth of the cache: tokens found in a cache, %")
        waits = _values(results, "overload", lambda report: report.ttft.mean)
        _draw(axes[1][1], waits, "Overload: mean time to the first token, s")
        figure.supxlabel("Simulated: eight workers, median of the seeds", fontsize=8)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata)


def _hits(results: Mapping[str, Results], trace: str) -> list[tuple[str, float]]:
    labels = [f"{trace}, {policy}" for policy in POLICIES]
    found = dict(_values(results, "policies", lambda report: 100 * report.hit_share))
    return [(label, found[label]) for label in labels if label in found]


def _values(
    results: Mapping[str, Results], cell: str, measure: Callable[[Report], float]
) -> list[tuple[str, float]]:
    found = results.get(cell)
    if found is None:
        return []
    return [(label, statistics.median(found.values(label, measure))) for label in found.labels]


def _draw(axes: "Axes", bars: list[tuple[str, float]], title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    if not bars:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    names = [name for name, _ in bars]
    colors = [_OURS if "tidemill" in name else _THEIRS for name in names]
    drawn = axes.barh(names, [value for _, value in bars], color=colors)
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    axes.margins(x=0.12)
