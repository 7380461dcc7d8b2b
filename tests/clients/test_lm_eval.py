"""lm-eval's scores over HTTP are those that it gets of transformers."""

from pathlib import Path

import pytest

from clients.conftest import RunClient


@pytest.mark.timeout(700)
@pytest.mark.clients(
    "lm-eval", notes="Tasks are local; scores and texts are those of its own `hf` model."
)
def test_scores_and_texts_are_those_of_transformers(
    run_client: RunClient, demo_model_dir: Path
) -> None:
    run_client("lm-eval", "lm_eval_scores.py", str(demo_model_dir), timeout=600)
