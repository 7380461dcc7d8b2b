"""The comparison with static batching: what it counts without a model, and a run with one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "static_batching.py"


def run_program(*arguments: str) -> str:
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fewer_steps(out: str) -> float:
    [ratio] = re.findall(r"([\d.]+) times fewer steps", out)
    return float(ratio)


def test_chats_take_a_fraction_of_the_steps_of_static_batches() -> None:
    assert fewer_steps(run_program("--steps-only")) > 4


def test_with_memory_for_everybody_less_is_won() -> None:
    scarce = fewer_steps(run_program("--steps-only", "--requests", "64"))
    plenty = fewer_steps(run_program("--steps-only", "--requests", "64", "--kv-tokens", "262144"))
    assert 1 <= plenty < scarce


@pytest.mark.model
@pytest.mark.slow
def test_both_modes_serve_the_requests_with_a_real_model(demo_model_dir: Path) -> None:
    memory = ("--kv-tokens", "2048", "--max-model-len", "1024")
    model = ("--model", str(demo_model_dir), "--threads", "1")
    out = run_program("--workload", "W3", "--requests", "3", *memory, *model)
    assert "times the output tokens per second" in out.replace("\n", " ")
    assert fewer_steps(out) >= 1
