"""A producer of each kind, and a mill that does what a test says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from support.fake_mill import FakeMill
from support.twins import TWINS, MakeTwin, Twin


@pytest.fixture(autouse=True)
def private_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the settings, the caches or the server of whoever runs it."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    monkeypatch.setenv("TIDEMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TIDEMILL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=list(TWINS))
def make_twin(request: pytest.FixtureRequest) -> Iterator[MakeTwin]:
    """Makes producers of one kind and closes them afterwards."""
    made: list[Twin] = []

    def make(*args: Any, **options: Any) -> Twin:
        made.append(TWINS[request.param](*args, **options))
        return made[-1]

    yield make
    for twin in made:
        twin.close()


@pytest.fixture
def producer(make_twin: MakeTwin, redis_url: str) -> Twin:
    """A producer of each kind."""
    return make_twin(redis_url)


@pytest.fixture
def mill(redis_client: redis.Redis) -> Iterator[FakeMill]:
    """A scheduler and a worker for model "m"; jobs that a test leaves open end with it."""
    mill = FakeMill(redis_client)
    yield mill
    mill.end_all()
