"""Pydantic AI, over chats and over responses."""

import pytest

from clients.conftest import RunClient

pytestmark = pytest.mark.clients(
    "pydantic-ai-slim", notes="`OpenAIProvider(base_url=...)` with either of its models."
)


@pytest.mark.timeout(700)
def test_pydantic_ai_gets_typed_outputs_and_streams(run_client: RunClient) -> None:
    run_client("pydantic-ai", "pydantic_ai_run.py", timeout=600)
