"""OpenAI's own client, as its users write with it, against real models."""

from pathlib import Path

import pytest

from clients.conftest import DEV, RunClient
from clients.mill import Mill

pytestmark = pytest.mark.clients("openai (Python)")

#: The recording of a known sentence; it is not everywhere.
CLIP = Path(__file__).parents[3] / "shared" / "data" / "audio" / "jfk.flac"


def test_it_chats_and_completes(run_client: RunClient) -> None:
    run_client(DEV, "openai_chat.py")


def test_it_keeps_and_resumes_responses(run_client: RunClient) -> None:
    run_client(DEV, "openai_responses.py")


def test_it_makes_vectors_and_hears(mill: Mill, run_client: RunClient) -> None:
    speech = [mill.speech_model, str(CLIP)] if CLIP.is_file() else []
    run_client(DEV, "openai_media.py", mill.embedding_model, *speech)


def test_it_works_off_batches(run_client: RunClient) -> None:
    run_client(DEV, "openai_batches.py")
