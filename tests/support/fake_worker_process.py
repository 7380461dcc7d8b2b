"""Workers with the fake model as processes of their own, so that they can be killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TESTS = Path(__file__).parents[1]


@contextmanager
def fake_worker(
    url: str, crash_at: str = "", *, step_seconds: float = 0.005
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker process and its id; it dies at the crash point ``crash_at`` if one is named."""
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "TIDEMILL_CRASH_AT": crash_at}
    command = [sys.executable, "-m", "support.fake_worker", url, str(step_seconds)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
