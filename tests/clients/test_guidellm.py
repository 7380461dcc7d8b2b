"""GuideLLM against the demo model."""

from pathlib import Path

import pytest

from clients.conftest import RunClient


@pytest.mark.timeout(700)
@pytest.mark.clients("guidellm")
def test_it_measures_chats_and_completions(run_client: RunClient, demo_model_dir: Path) -> None:
    run_client("guidellm", "guidellm_run.py", str(demo_model_dir), timeout=600)
