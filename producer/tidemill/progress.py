"""How far a ``map`` is, told to a function or shown as a bar."""

import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.protocol.errors import InvalidRequest

if TYPE_CHECKING:  # the SDK works without loading it
    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class MapProgress:
    """Items of a ``map`` that have an outcome, those of them that failed, and those in flight.

    ``total`` is None if the items cannot be counted before they are read.
    """

    done: int
    failed: int
    in_flight: int
    total: int | None


class Reporter:
    """Tells each new count once: to ``progress``, to a bar if that is True, or to nobody."""

    def __init__(self, progress: bool | Callable[[MapProgress], object], items: object) -> None:
        if not isinstance(progress, bool) and not callable(progress):
            raise InvalidRequest(
                f"progress: {type(progress).__name__} is neither True nor a function",
                field="progress",
            )
        self._total = len(items) if isinstance(items, Sized) else None
        self._bar = _Bar() if progress is True else None
        self._tell = self._bar.show if self._bar is not None else (progress or None)
        self._told: MapProgress | None = None

    def report(self, done: int, failed: int, in_flight: int) -> None:
        """Tell these counts unless they were told last."""
        now = MapProgress(done, failed, in_flight, self._total)
        if self._tell is not None and now != self._told:
            self._told = now
            self._tell(now)  # type: ignore[operator]  # True has become a bar's

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


class _Bar:
    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, now: MapProgress) -> None:
        if self._progress is None or self._task is None:
            self._progress = _open_bar()
            self._task = self._progress.add_task("map", total=now.total, failed=0, in_flight=0)
        self._progress.update(
            self._task, completed=now.done, failed=now.failed, in_flight=now.in_flight
        )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _open_bar() -> "Progress":
    # Loading it takes longer than loading the SDK.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("in flight {task.fields[in_flight]}"),
        TextColumn("failed {task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        # What is printed meanwhile goes above the bar, but never away from a file or a pipe.
        redirect_stdout=sys.stdout.isatty(),
    )
    progress.start()
    return progress
