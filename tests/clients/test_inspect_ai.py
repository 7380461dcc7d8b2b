"""Inspect's evaluations against the demo model."""

import pytest

from clients.conftest import RunClient


@pytest.mark.timeout(700)
@pytest.mark.clients("inspect-ai")
def test_it_evaluates_chats_and_tool_calls(run_client: RunClient) -> None:
    run_client("inspect-ai", "inspect_eval.py", timeout=600)
