"""What a name on the command line stands for: a made-up workload, or a trace in a file."""

from pathlib import Path

from tidemill.protocol.errors import ConfigError
from tidemill_scheduler.simulation.generators import GENERATORS
from tidemill_scheduler.simulation.traces import load_trace
from tidemill_scheduler.simulation.workload import Workload


def find_workload(name: str, seed: int, scale: float) -> Workload:
    """Return a generator's workload or the trace at a path, shuffled in its own order of arrival.

    Raises ``ConfigError``.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"scale: {scale:g} is not a share", fix="Give more than 0, at most 1.")
    if name in GENERATORS:
        return GENERATORS[name](seed, scale)
    if not _is_file(name):
        raise ConfigError(
            f"trace: {name!r} is neither a file nor a made-up workload",
            fix=f"Give a .jsonl or .csv trace, or one of {', '.join(GENERATORS)}.",
        )
    workload = load_trace(name)
    return workload if scale >= 1 else workload.first(max(1, round(scale * workload.num_jobs)))


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
