"""Any process under chaos: ``python -m chaos.process ROLE RUN_JSON ARGUMENTS...``.

``RUN_JSON`` is a ``ProcessSpec``.  A planted bug or another function library takes effect before
anything of ours is imported that could have copied it.
"""

import importlib
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.history import Recorder


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process needs to take part in a run; ``name`` is unique to this start of it."""

    name: str
    role: str
    index: int
    url: str
    directory: str
    seed: int
    num_jobs: int
    seconds: float
    started: float
    duplicate_share: float = 0.0
    patch: str = ""
    library: str = ""

    def command(self) -> list[str]:
        """The command line that starts the process."""
        return [sys.executable, "-m", "chaos.process", json.dumps(asdict(self))]

    @property
    def recorder(self) -> Recorder:
        """Where this start of the process records what it does."""
        return Recorder(Path(self.directory) / f"{self.name}.jsonl")


def main() -> int:
    """Prepare and run one process."""
    from tidemill.service.runtime import exit_with_parent

    spec = ProcessSpec(**json.loads(sys.argv[1]))
    exit_with_parent()
    if spec.library:
        from tidemill.protocol import functions

        functions.LUA_SOURCE = Path(spec.library).read_text()
    if spec.patch:
        importlib.import_module(spec.patch)
    if spec.duplicate_share:
        from chaos import duplicates

        duplicates.install(spec.duplicate_share, random.Random(spec.name))
    return int(importlib.import_module(f"chaos.{spec.role}").main(spec))


if __name__ == "__main__":
    sys.exit(main())
