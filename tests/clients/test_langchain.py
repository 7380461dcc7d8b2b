"""LangChain's classes for OpenAI, and agents that are made of them."""

import pytest

from clients.conftest import RunClient
from clients.mill import Mill

pytestmark = [
    pytest.mark.clients(
        "langchain-openai",
        notes="`OpenAIEmbeddings` needs `check_embedding_ctx_length=False`: it sends token ids of "
        "an OpenAI model otherwise.",
    ),
    pytest.mark.timeout(700),
]


def test_langchain_chats_calls_tools_and_fills_schemas(run_client: RunClient) -> None:
    run_client("langchain", "langchain_chats.py")


def test_langchain_searches_and_runs_agents(mill: Mill, run_client: RunClient) -> None:
    run_client("langchain", "langchain_agents.py", mill.embedding_model)
