"""What the daemon's decisions may cost, in rounds of a calibration loop of about half a us each."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "daemon_cost.py"
SMALL = ["--jobs", "500", "4000", "--workers", "50", "--repeat", "3", "--memory-jobs", "20000"]

#: Limits in rounds with 4,000 jobs and 50 workers: three times what was measured, and more.
LIMITS = {"add": 40, "take+peek": 30, "remove": 20, "epoch": 2500, "steal": 900}

#: The same for a job in the whole scheduler, where a tick has some 80 decisions.
SCHEDULER_LIMITS = {"arrival": 80, "decision": 250, "status": 90, "KV hash": 8, "tick p99": 30_000}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("daemon") / "figures.json"
    run_program(*SMALL, "--json", str(file))
    return json.loads(file.read_text())


def run_program(*arguments: str) -> str:
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LIMITS)
def test_an_operation_stays_below_its_limit(figures: Any, name: str) -> None:
    assert 0 < figures["costs"]["4000"][name]["rounds"] <= LIMITS[name]


@pytest.mark.parametrize("name", SCHEDULER_LIMITS)
def test_a_job_stays_below_its_limits_in_the_scheduler(figures: Any, name: str) -> None:
    assert 0 < figures["scheduler"]["4000"][name]["rounds"] <= SCHEDULER_LIMITS[name]


def test_a_decision_hardly_costs_more_with_eight_times_as_many_jobs(figures: Any) -> None:
    few, many = (figures["scheduler"][size]["decision"]["rounds"] for size in ("500", "4000"))
    assert many <= 2.5 * few


@pytest.mark.parametrize("name", ["add", "take+peek", "remove"])
def test_eight_times_as_many_jobs_hardly_make_one_cost_more(figures: Any, name: str) -> None:
    few, many = (figures["costs"][size][name]["rounds"] for size in ("500", "4000"))
    assert many <= 2.5 * few


def test_a_million_jobs_would_wait_in_less_than_a_gigabyte(figures: Any) -> None:
    memory = figures["memory"]
    assert memory["per_job"] == memory["bytes"] / memory["jobs"]
    # The routing key alone has 200 bytes.
    assert 200 < memory["per_job"] < 1000


def test_the_table_has_each_operation_in_both_units() -> None:
    out = run_program("--jobs", "500", "--workers", "5", "--repeat", "1", "--memory-jobs", "0")
    assert "us" in out and "rounds" in out
    assert all(name in out for name in LIMITS)


def test_the_help_tells_how_to_read_the_table() -> None:
    text = run_program("--help")
    assert "rounds" in text and "--memory-jobs" in text and "--memory-child" not in text


def test_the_cost_of_the_interactive_lane_is_told_for_few_and_many_workers() -> None:
    program = PROGRAM.with_name("interactive_cost.py")
    command = [sys.executable, str(program), "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    costs = dict(reversed(line.split(" us  ")) for line in done.stdout.splitlines())
    assert all(float(cost) > 0 for cost in costs.values())
    for workers in (8, 1000):
        assert {f"{what}, 50 queued, {workers} workers" for what in ("bind", "pick", "steal")} < {
            *costs
        }
