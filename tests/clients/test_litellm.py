"""LiteLLM, which tells from words in a message what went wrong."""

from pathlib import Path

import pytest

from clients.conftest import RunClient
from clients.mill import Mill

#: The recording of a known sentence; it is not everywhere.
CLIP = Path(__file__).parents[3] / "shared" / "data" / "audio" / "jfk.flac"
#: Otherwise it looks for a list of prices on the web whenever it is imported.
OFFLINE: dict[str, str | None] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

pytestmark = [
    pytest.mark.clients(
        "litellm",
        notes="Models are named `hosted_vllm/MODEL`. It takes `additionalProperties` out of the "
        "schemas of tools; calls have no further properties all the same.",
    ),
    pytest.mark.timeout(700),
]


def test_litellm_chats_and_tells_errors_apart(run_client: RunClient) -> None:
    run_client("litellm", "litellm_calls.py", env=OFFLINE)


def test_litellm_makes_vectors_and_hears(mill: Mill, run_client: RunClient) -> None:
    speech = [mill.speech_model, str(CLIP)] if CLIP.is_file() else []
    models = [mill.embedding_model, *speech]
    run_client("litellm", "litellm_vectors.py", *models, env=OFFLINE)
