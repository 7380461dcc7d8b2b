"""Outlines: output types, as it asks vLLM for them and OpenAI."""

import pytest

from clients.conftest import RunClient

pytestmark = pytest.mark.clients("outlines", notes="`from_vllm` knows more types.")


@pytest.mark.timeout(700)
def test_outlines_gets_the_types_that_it_asks_for(run_client: RunClient) -> None:
    run_client("outlines", "outlines_generate.py", timeout=600)
