"""OpenAI's own client, as its users write with it, against real models."""

import pytest

from clients.conftest import DEV, RunClient

pytestmark = pytest.mark.clients("openai (Python)")


def test_it_chats(run_client: RunClient) -> None:
    run_client(DEV, "openai_python.py")
