"""Telling a waiting user what the demo model's preparation is doing."""

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressReport(Protocol):
    """Receives the phases of a long preparation and the bytes of the current one."""

    def phase(self, title: str) -> None:
        """A new phase starts; the one before it is done."""

    def progress(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of the current phase are there."""


class SilentReport:
    """Shows nothing."""

    def phase(self, title: str) -> None:
        """Ignore it."""

    def progress(self, done: int, total: int) -> None:
        """Ignore it."""


class TerminalReport:
    """Progress bars on standard error; nothing is drawn or imported before the first phase."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "TerminalReport":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            if error is None:
                self._finish_phase(self._bars)
            self._bars.stop()

    def phase(self, title: str) -> None:
        """Tick off the phase before and show ``title`` with a clock."""
        if self._bars is None:
            self._bars = _start_bars()
        self._finish_phase(self._bars)
        self._task = self._bars.add_task(title, total=None, size="")

    def progress(self, done: int, total: int) -> None:
        """Move the bar of the current phase."""
        if self._bars is not None and self._task is not None:
            size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self._bars.update(self._task, completed=done, total=total, size=size)

    def _finish_phase(self, bars: "Progress") -> None:
        if self._task is not None:
            bars.update(self._task, completed=1, total=1)


def _start_bars() -> "Progress":
    # Imported here: the usual call finds the model ready and shows nothing.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[size]}"),
    )
    bars = Progress(*columns, console=Console(stderr=True))
    bars.start()
    return bars
