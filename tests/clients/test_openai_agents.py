"""OpenAI's Agents SDK, over chats and over responses."""

import pytest

from clients.conftest import RunClient

pytestmark = pytest.mark.clients(
    "openai-agents",
    notes="`set_tracing_disabled(True)`, or traces go to OpenAI; chats that are streamed tell "
    "their usage with `ModelSettings(include_usage=True)`.",
)


@pytest.mark.timeout(700)
def test_agents_call_tools_and_go_on_with_their_results(run_client: RunClient) -> None:
    run_client("openai-agents", "agents_run.py", timeout=600)
