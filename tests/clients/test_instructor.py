"""Instructor: models of pydantic, whichever way they are asked for."""

import pytest

from clients.conftest import RunClient

pytestmark = pytest.mark.clients(
    "instructor",
    notes="JSON mode promises an object, not your model: prefer `TOOLS` or `JSON_SCHEMA`.",
)


@pytest.mark.timeout(700)
def test_instructor_fills_models(run_client: RunClient) -> None:
    run_client("instructor", "instructor_extract.py", timeout=600)
