"""DSPy, by its own HTTP client."""

from pathlib import Path

import pytest

from clients.conftest import RunClient

pytestmark = pytest.mark.clients(
    "dspy",
    notes="Asks for schemas only where a registered provider says `response_schema=True`.",
)


@pytest.mark.timeout(700)
def test_dspy_predicts_what_its_signature_says(run_client: RunClient, tmp_path: Path) -> None:
    run_client("dspy", "dspy_predict.py", timeout=600, env={"DSPY_CACHEDIR": str(tmp_path)})
