"""The tests of the functions run them under guard."""

from collections.abc import Iterator

import pytest
import redis

from support.strict_library import strict_source
from tidemill.protocol.functions import ensure_library


@pytest.fixture
def redis_client(redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """A client of an empty server whose functions fail when they break a rule of the library."""
    redis_client.function_load(strict_source(), replace=True)
    yield redis_client
    ensure_library(redis_client)
