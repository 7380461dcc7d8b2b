"""canitoolcall's probe against the demo model."""

import pytest

from clients.conftest import DEV, RunClient


@pytest.mark.timeout(1900)
@pytest.mark.clients(
    "canitoolcall", notes="Checks that fail are those of what the small model chooses to call."
)
def test_its_probe_finds_nothing_wrong_but_what_the_model_chooses(run_client: RunClient) -> None:
    run_client(DEV, "canitoolcall_probe.py", timeout=1800)
