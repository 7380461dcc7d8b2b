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
    if name in GENERATORS:
        return GENERATORS[name](seed, scale)
    if not Path(name).is_file():
        raise ConfigError(
            f"trace: {name!r} is neither a file nor a made-up workload",
            fix=f"Give a .jsonl or .csv trace, or one of {', '.join(GENERATORS)}.",
        )
    workload = load_trace(name)
    return workload if scale >= 1 else workload.first(max(1, round(scale * workload.num_jobs)))
