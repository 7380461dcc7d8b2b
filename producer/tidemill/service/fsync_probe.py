"""How long an fsync takes on a directory's disk, and what durability that allows."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

#: A server setting: ``always`` syncs before it acknowledges, ``everysec`` about once a second.
FsyncPolicy = Literal["always", "everysec", "no"]

#: Median above which syncing every write would dominate what a caller waits for.
SLOW_FSYNC_SECONDS = 0.010

_SAMPLES = 15
_BUDGET_SECONDS = 1.0
_RECORD = bytes(4096)

# What the servers themselves call: file size reaches the disk too, timestamps need not.
_sync = cast(Callable[[int], None], getattr(os, "fdatasync", os.fsync))


def measure_fsync_seconds(directory: Path) -> float:
    """Median seconds of an append and fsync in ``directory``; takes about a second at most."""
    samples: list[float] = []
    deadline = time.monotonic() + _BUDGET_SECONDS
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        while len(samples) < _SAMPLES and (not samples or time.monotonic() < deadline):
            start = time.perf_counter()
            file.write(_RECORD)
            _sync(file.fileno())
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def policy_for(fsync_seconds: float) -> FsyncPolicy:
    """The safest policy that a disk with this median fsync can bear."""
    return "always" if fsync_seconds < SLOW_FSYNC_SECONDS else "everysec"
