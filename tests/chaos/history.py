"""The record of a run: one append-only file per writer, one JSON object a line.

Each line has ``t``, seconds of the monotonic clock, which all processes of a machine share and
which no skewed wall clock touches; ``e``, what happened; and the fields of that event.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Recorder:
    """Appends events; a line once written survives the death of its writer."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def record(self, event: str, **fields: Any) -> None:
        """Write one event in one system call."""
        line = json.dumps({"t": round(time.monotonic(), 4), "e": event, **fields})
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_events(path: Path) -> Iterator[Event]:
    """The events of one file; a line cut short by its writer's death is passed over."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def read_history(directory: Path) -> list[Event]:
    """The events of all files of a run in the order of their times, then of the files' names."""
    files = sorted(directory.glob("*.jsonl"))
    events = [event for path in files for event in read_events(path)]
    return sorted(events, key=lambda event: event["t"])
