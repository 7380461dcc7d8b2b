"""What the programs of clients that are command lines share."""

import os
import subprocess
import sys
from collections.abc import Container
from pathlib import Path


def script(name: str) -> str:
    """Return a command of the environment that this program runs in."""
    return str(Path(sys.executable).with_name(name))


def run(*command: str, statuses: Container[int] = (0,), **environ: str) -> str:
    """Run a command and return all it printed; ends this program where it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in statuses:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stdout}")
    return done.stdout
