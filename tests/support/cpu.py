"""How much of a core a process uses."""

import os
import time
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its threads have used, in the kernel and outside of it."""
    # Its command, in brackets, may hold spaces; utime and stime are the 14th and 15th field.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def cpu_share(pid: int, seconds: float) -> float:
    """Share of one core that a process uses during so many seconds from now."""
    before, started = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - started)
