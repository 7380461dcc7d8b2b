"""A small batch soak: every kind of process is killed once."""

from pathlib import Path

import pytest

from batches.soak import run


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_batch_survives_the_death_of_every_kind_of_process(tmp_path: Path) -> None:
    # So slow that nothing is over before everybody has died.
    outcome = run(1500, 1, 7, tmp_path, step_seconds=0.5)
    assert outcome.faults(1500) == []
    assert set(outcome.kills) == {"gateway", "scheduler", "worker", "runner"}
