"""Clients for Node: OpenAI's own, and Vercel's AI SDK over chats and over the Responses API."""

from pathlib import Path

import pytest

from clients.conftest import RunClient
from clients.install import NODE
from clients.mill import Mill

#: The recording of a known sentence; it is not everywhere.
CLIP = Path(__file__).parents[3] / "shared" / "data" / "audio" / "jfk.flac"
openai_client = pytest.mark.clients(
    "openai (Node)", notes="The last major for Node 20; newer ones need 22."
)
compatible_provider = pytest.mark.clients(
    "@ai-sdk/openai-compatible",
    notes="With `supportsStructuredOutputs: true`, or objects are asked for as any JSON; "
    "with `includeUsage: true`, or streams have no usage.",
)
openai_provider = pytest.mark.clients(
    "@ai-sdk/openai", notes="`createOpenAI({ baseURL })` uses the Responses API."
)
pytestmark = pytest.mark.timeout(700)


@openai_client
def test_openais_client_chats_and_works_off_batches(run_client: RunClient) -> None:
    run_client(NODE, "openai_node.mjs")


@openai_client
def test_openais_client_makes_vectors_and_hears(mill: Mill, run_client: RunClient) -> None:
    speech = [mill.speech_model, str(CLIP)] if CLIP.is_file() else []
    run_client(NODE, "openai_vectors.mjs", mill.embedding_model, *speech)


@compatible_provider
def test_vercels_sdk_chats_calls_tools_and_fills_schemas(run_client: RunClient) -> None:
    run_client(NODE, "ai_sdk.mjs", "compatible")


@openai_provider
def test_vercels_sdk_speaks_the_responses_api(run_client: RunClient) -> None:
    run_client(NODE, "ai_sdk.mjs", "openai")


@compatible_provider
def test_vercels_sdk_makes_vectors(mill: Mill, run_client: RunClient) -> None:
    run_client(NODE, "ai_sdk_vectors.mjs", mill.embedding_model)
