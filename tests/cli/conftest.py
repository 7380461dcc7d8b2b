"""The command line run in this process, against a server with a mill that does what a test says."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from click.testing import Result as Outcome
from typer.testing import CliRunner

from support.fake_mill import FakeMill
from tidemill import Producer
from tidemill.cli.main import app

Tidemill = Callable[..., Outcome]


@pytest.fixture
def mill(redis_client: redis.Redis) -> Iterator[FakeMill]:
    """A scheduler and a worker for model "m"; jobs that a test leaves open end with it."""
    mill = FakeMill(redis_client)
    yield mill
    mill.end_all()


@pytest.fixture
def producer(redis_url: str) -> Iterator[Producer]:
    """A client of the tenant ``default``."""
    with Producer(redis_url) as producer:
        yield producer


@pytest.fixture
def tidemill(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs a command; errors of ours are found in ``exception``."""
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_url)
    monkeypatch.setenv("TIDEMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TIDEMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str, answer: str = "") -> Outcome:
        return CliRunner().invoke(app, args, input=answer)

    return run
