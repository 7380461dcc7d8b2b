"""AIPerf against the demo model."""

from pathlib import Path

import pytest

from clients.conftest import RunClient


@pytest.mark.timeout(700)
@pytest.mark.clients("aiperf", notes="With `HF_HUB_OFFLINE` it does not take a local tokenizer.")
def test_it_profiles_streamed_chats(run_client: RunClient, demo_model_dir: Path) -> None:
    run_client("aiperf", "aiperf_profile.py", str(demo_model_dir), timeout=600)
