"""LlamaIndex's OpenAILike, and questions to documents."""

import pytest

from clients.conftest import RunClient
from clients.mill import Mill

pytestmark = [
    pytest.mark.clients(
        "llama-index-llms-openai-like",
        notes="`is_chat_model=True` for chats; `is_function_calling_model=True` and "
        "`should_use_structured_outputs=True` for tools and schemas.",
    ),
    pytest.mark.timeout(700),
]


def test_llamaindex_chats_calls_tools_and_fills_schemas(run_client: RunClient) -> None:
    run_client("llamaindex", "llamaindex_chats.py")


def test_llamaindex_answers_from_documents(mill: Mill, run_client: RunClient) -> None:
    run_client("llamaindex", "llamaindex_search.py", mill.embedding_model)
