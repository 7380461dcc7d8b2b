"""The queue benchmark in its smallest size: that it runs, checks itself and writes every figure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.valkey import require_server_binary

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "queue_bench.py"
STAGES = ["submit", "dispatch", "append x1", "append x64", "append x256", "beat", "finish"]
SMALLEST = ["--jobs", "256", "--repeat", "1", "--singles", "20", "--steps", "3", "--no-tool"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require_server_binary()
    directory = tmp_path_factory.mktemp("bench")
    run_program(*SMALLEST, "--levels", "everysec", "--json", str(directory / "figures.json"))
    return json.loads((directory / "figures.json").read_text())


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_every_stage_has_its_rates_beside_the_plain_ones(figures: Any) -> None:
    stages = figures["levels"]["everysec"]["stages"]
    assert list(stages) == STAGES
    for stage in stages.values():
        for rates in (stage, stage["plain"]):
            assert rates["per_cpu_second"] > 0 and rates["per_second"] > 0
            assert len(rates["runs"]) == 1
        expected = stage["per_cpu_second"] / stage["plain"]["per_cpu_second"]
        assert stage["ratio"] == pytest.approx(expected)


def test_a_job_takes_more_memory_than_its_prompt_and_less_than_three_times_that(
    figures: Any,
) -> None:
    memory = figures["levels"]["everysec"]["memory"]
    assert 2_000 < memory["queued_bytes"] < 6_000
    # Ten chunks of 160 bytes.
    assert memory["running_bytes"] > memory["queued_bytes"] + 1_600


def test_shares_of_a_step_are_those_of_256_sequences_in_50_ms(figures: Any) -> None:
    for name in ("streamed", "quiet"):
        step = figures["levels"]["everysec"][name]
        both = step["server_us_per_token"] + step["publisher_us_per_token"]
        assert step["share"] == pytest.approx(both * 256 / 50_000)


def test_each_target_of_the_level_is_judged_by_its_figure(figures: Any) -> None:
    judged = {target["what"]: target for target in figures["targets"]}
    submits = judged["submits per CPU second"]
    assert submits["value"] == figures["levels"]["everysec"]["stages"]["submit"]["per_cpu_second"]
    assert submits["met"] == (submits["value"] >= 5_000)
    latency = judged["submit p99 ms"]
    assert latency["met"] == (latency["value"] <= 10)
    assert {target["level"] for target in figures["targets"]} == {"everysec"}


def test_the_conditions_of_a_measurement_are_written_with_it(figures: Any) -> None:
    assert figures["settings"]["jobs"] == "256"
    assert figures["levels"]["everysec"]["server"].split()[0] in ("Valkey", "Redis")
    assert {"date", "python", "redis-py", "machine"} <= set(figures["conditions"])


def test_the_help_tells_how_to_read_the_table() -> None:
    text = run_program("--help").stdout
    assert "per CPU s" in text and "plain" in text and "--levels" in text
