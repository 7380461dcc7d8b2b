"""Faults that need a stage of their own, or that lose what the broker has acknowledged."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.plan import Fault, Plan, make_plan
from chaos.run import Report, perform, print_report
from chaos.stage import StageOptions
from support.valkey import require_server_binary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

NUM_JOBS = 300
SECONDS = 10.0
#: Megabytes; what the jobs need and little more.
DISK_SIZE = 12


def make_scenario(seed: int, *names: str) -> Plan:
    """Few jobs, workers that are killed now and then, and the named faults at regular times."""
    plan = make_plan(seed, NUM_JOBS, SECONDS, ["kill_worker"], mean_gap=3.0)
    step = SECONDS / (len(names) + 1)
    special = [
        Fault(step * (index + 1), name, "worker", 1, 1.0) for index, name in enumerate(names)
    ]
    faults = sorted((*plan.faults, *special), key=lambda fault: fault.at)
    return replace(plan, faults=tuple(faults))


def play(plan: Plan, directory: Path, options: StageOptions) -> Report:
    """Carry a scenario out; every promise must hold."""
    require_server_binary()
    report = perform(plan, directory, options, quiet=True)
    print_report(report)
    assert not report.violations
    return report


def check_most_are_done(report: Report) -> None:
    """Of the jobs that are left: how many a tail had depends on how busy the machine is."""
    num_left = report.measures.states.total()
    assert num_left > 0.3 * NUM_JOBS
    assert report.measures.states["done"] > 0.8 * num_left


def test_only_jobs_that_no_replica_had_may_be_lost_when_one_is_promoted(tmp_path: Path) -> None:
    report = play(make_scenario(31, "promote"), tmp_path, StageOptions(has_replica=True))
    check_most_are_done(report)


def test_only_the_tail_is_lost_when_the_log_is_cut_short(tmp_path: Path) -> None:
    report = play(make_scenario(32, "cut_log", "cut_log"), tmp_path, StageOptions())
    check_most_are_done(report)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is soon full."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}m", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_nothing_accepted_is_lost_when_the_disk_is_full(small_disk: Path, tmp_path: Path) -> None:
    options = StageOptions(data_dir=small_disk / "data")
    report = play(make_scenario(33, "fill_disk", "fill_disk"), tmp_path, options)
    assert report.counts["broker ended"] >= 1
    assert report.measures.states["done"] > 0.8 * NUM_JOBS
