"""A stage for processes that die."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.actors import Troupe
from support.crash_stage import CrashStage


@pytest.fixture
def troupe(tmp_path: Path) -> Iterator[Troupe]:
    """Starts processes; ends them after the test."""
    troupe = Troupe(tmp_path)
    yield troupe
    troupe.close()


@pytest.fixture
def stage(redis_client: redis.Redis, redis_url: str, troupe: Troupe) -> CrashStage:
    """Processes around the server of the session."""
    return CrashStage(redis_client, redis_url, troupe)
