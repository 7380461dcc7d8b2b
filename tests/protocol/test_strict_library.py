"""The guard around the library must itself be able to fail."""

import pytest
import redis

from support import shard
from support.shard import KEYS
from support.strict_library import strict_source
from tidemill.protocol import calls
from tidemill.protocol.errors import IdempotencyConflict
from tidemill.protocol.functions import run
from tidemill.protocol.library import library_source

pytestmark = pytest.mark.leaks_keys


def load(client: redis.Redis, old: str, new: str) -> None:
    source = library_source()
    assert source.count(old) == 1
    client.function_load(strict_source(source=source.replace(old, new)), replace=True)


def test_a_key_that_was_not_declared_is_an_error(redis_client: redis.Redis) -> None:
    question = "redis.call('EXISTS', K[1]) == 1 and redis.call('XLEN', K[1]) > 0"
    load(redis_client, question, question.replace("'EXISTS', K[1]", "'EXISTS', 'act'"))
    with pytest.raises(redis.ResponseError, match="undeclared key act"):
        run(redis_client, calls.retire(KEYS, "p1:default"))


def test_a_refusal_that_has_written_is_an_error(redis_client: redis.Redis) -> None:
    refusal = "if sha ~= A[10] then return"
    shard.submit(redis_client, idempotency_key="k", body_digest="a")
    load(redis_client, refusal, "if sha ~= A[10] then redis.call('DEL', K[9]) return")
    with pytest.raises(redis.ResponseError, match="refused after a write"):
        shard.submit(redis_client, idempotency_key="k", body_digest="b")
    redis_client.function_load(strict_source(), replace=True)
    with pytest.raises(IdempotencyConflict):
        shard.submit(redis_client, idempotency_key="k", body_digest="b")
