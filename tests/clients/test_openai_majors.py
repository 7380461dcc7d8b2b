"""The same programs with OpenAI's clients of older major versions, which libraries still pin."""

import pytest

from clients.conftest import RunClient

pytestmark = pytest.mark.clients("openai (Python), older majors")


@pytest.mark.timeout(700)
@pytest.mark.parametrize("group", ["openai2", "openai3"])
def test_older_majors_of_openais_client_do_the_same(run_client: RunClient, group: str) -> None:
    run_client(group, "openai_chat.py", timeout=600)
