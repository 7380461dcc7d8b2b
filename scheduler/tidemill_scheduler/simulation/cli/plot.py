"""Reports of one workload side by side, as bars."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.cli.files import cannot_write, check_writable
from tidemill_scheduler.simulation.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")


def check_plot_path(path: Path) -> None:
    """Raise ``ConfigError`` unless a plot can be written there; long work comes before it."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"plot: {path} ends in {path.suffix!r}", fix=f"End it in {', '.join(SUFFIXES)}."
        )
    if not path.parent.is_dir():
        raise ConfigError(f"plot: there is no directory {path.parent}", fix="Make it first.")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "plot: the package 'matplotlib' is not installed",
            fix='Install it with: pip install "tidemill[plots]".',
        )
    check_writable(path, "plot")


def save_plot(reports: Mapping[str, Report], path: Path, *, is_bulk: bool) -> None:
    """Draw hit rates beside makespans, or beside times to the first token, of each policy.

    Raises ``ConfigError`` if the file cannot be written after all.
    """
    from matplotlib import rc_context  # an extra, and slow to load

    # No date inside and no random ids, so that the same run writes the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with rc_context({"svg.hashsalt": "tidemill"}):
        figure = _draw(reports, is_bulk=is_bulk)
        try:
            figure.savefig(path, metadata=metadata)
        except OSError as error:
            raise cannot_write(path, "plot", error) from error


def _draw(reports: Mapping[str, Report], *, is_bulk: bool) -> "Figure":
    from matplotlib.figure import Figure  # see save_plot

    names, values = list(reports), list(reports.values())
    figure = Figure(figsize=(10, 0.6 + 0.45 * len(names) + 0.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh(names, [100 * r.hit_share for r in values], color="tab:blue")
    left.axvline(100 * values[0].bound_share, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("prompt tokens found in a cache, % (dashed: an endless cache)")
    left.invert_yaxis()
    if is_bulk:
        bars = right.barh(names, [r.makespan for r in values], color="tab:orange")
        right.set_xlabel("makespan, s")
    else:
        bars = right.barh(names, [r.ttft.mean for r in values], color="tab:orange")
        right.set_xlabel("mean time to first token, s")
    right.bar_label(bars, fmt="%.3g", padding=3)
    right.margins(x=0.12)
    figure.suptitle(f"{values[0].workload}, {values[0].num_workers:,} workers")
    return figure
