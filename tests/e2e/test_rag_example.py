"""``examples/rag.py`` against the real model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.cli.stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(280)]

PROGRAM = Path(__file__).parents[2] / "examples" / "rag.py"


def test_the_example_computes_less_than_it_sends(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={"TIDEMILL_REDIS_URL": stack.url},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    as_found, canonical = map(float, re.findall(r"([\d.]+)% shared", done.stdout)[:2])
    assert canonical > as_found + 10
    counts = re.findall(r"(\d+) of (\d+) prompt tokens computed", done.stdout)
    assert len(counts) == 2
    assert all(int(computed) < 0.8 * int(total) for computed, total in counts)
