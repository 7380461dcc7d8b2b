"""The benchmark of the engine's overheads in a small size: its parts, and that it can miss."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A minute of a real model, and shares of time that other work on the machine can distort.
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "engine_overheads.py"


@pytest.fixture(scope="module")
def run(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("overheads") / "figures.json"
    options = ["--model", str(demo_model_dir), "--repeat", "2", "--rows", "1", "--json", str(file)]
    command = [sys.executable, str(PROGRAM), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_caching_without_hits_costs_less_than_a_hundredth_of_a_step(run: Any) -> None:
    [row] = run[1]["caching"]
    assert 0 < row["inside"] < 0.01 * row["step"]
    assert row["around"] < 0.01 * row["step"]
    assert len(row["ratios"]) == 2


def test_a_cached_prompt_has_its_first_token_in_less_than_half_the_cpu_time(run: Any) -> None:
    [row] = run[1]["hits"]
    # Processor time: the wall clock also counts what else the machine does.
    assert sum(row["warm_cpu"]) < 0.5 * sum(row["cold_cpu"])
    assert row["num_same"] > 0


def test_every_layout_of_the_blocks_is_timed_beside_one_block(run: Any) -> None:
    [row] = run[1]["blocks"]
    assert row["seconds"] > 0
    assert set(row["ratios"]) == {"in order", "scattered", "torch SDPA"}
    assert all(len(ratios) == 2 for ratios in (*row["ratios"].values(), row["lookups"]))


def test_the_output_says_of_each_limit_whether_it_is_kept(run: Any) -> None:
    lines = run[0].splitlines()
    lookups = "lookups in the block table"
    for part in ("prefix caching at 0 % hits", lookups, "first token at 80 % hits"):
        [line] = [line for line in lines if line.startswith(f"{part}:")]
        assert line.endswith(("limit kept", "LIMIT MISSED"))
