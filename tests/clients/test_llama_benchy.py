"""llama-benchy against the demo model."""

from pathlib import Path

import pytest

from clients.conftest import RunClient


@pytest.mark.timeout(700)
@pytest.mark.clients("llama-benchy", notes="The book it makes prompts of is served locally.")
def test_it_measures_streams_of_exact_lengths(run_client: RunClient, demo_model_dir: Path) -> None:
    run_client("llama-benchy", "llama_benchy_run.py", str(demo_model_dir), timeout=600)
