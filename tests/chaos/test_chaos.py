"""The chaos of every change: one seed, 1,500 jobs, about half a minute."""

from pathlib import Path

import pytest

from chaos.plan import make_plan
from chaos.run import perform, print_report
from chaos.stage import StageOptions
from support.valkey import require_server_binary

SEED = 20
NUM_JOBS = 1500
SECONDS = 20.0


@pytest.mark.timeout(280)
def test_every_promise_holds_while_everything_is_killed_paused_and_cut_off(tmp_path: Path) -> None:
    require_server_binary()
    report = perform(make_plan(SEED, NUM_JOBS, SECONDS), tmp_path, StageOptions(), quiet=True)
    print_report(report)
    assert not report.violations
    assert report.num_kills >= 10
    # A submission without a key whose reply was lost is not repeated.
    assert report.measures.num_accepted >= 0.9 * NUM_JOBS
