"""The functions of files and batches, called twice, out of turn and by those who may not."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from support.shard import KEYS, server_ms
from support.strict_library import strict_source
from tidemill.protocol import calls
from tidemill.protocol.batches import Batch, BatchUsage, NewBatch
from tidemill.protocol.errors import IdempotencyConflict, NoSuchObject
from tidemill.protocol.files import StoredFile
from tidemill.protocol.functions import LUA_SOURCE, Call, run
from tidemill_webhooks.events import read_entry

FILE = StoredFile("file-1", 10, "in.jsonl", "batch")
BATCH = NewBatch("batch_1", "/v1/completions", "file-1", "24h", 86_400, {"a": "b"})
USAGE = BatchUsage(3, 2, 1)


@pytest.fixture
def client(redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """A server whose library refuses undeclared keys, and errors after a write."""
    redis_client.function_load(strict_source(), replace=True)
    yield redis_client
    redis_client.function_load(LUA_SOURCE, replace=True)


def accept(client: redis.Redis) -> None:
    assert run(client, calls.put_file(KEYS, "t", FILE, ttl_ms=10**9))
    assert run(client, calls.create_batch(KEYS, "t", BATCH)) == (1, "batch_1")


def lease(client: redis.Redis, owner: str = "a", lease_ms: int = 60_000, **told: int) -> bool:
    call = calls.lease_batch(KEYS, "t", "batch_1", owner=owner, lease_ms=lease_ms, **told)
    return run(client, call).ok


def turn(client: redis.Redis, was: str, becomes: str, owner: str = "a") -> tuple[int, str]:
    call = calls.turn_batch(
        KEYS, "t", "batch_1", owner=owner, was=was, becomes=becomes, fields=("n", 5)
    )
    return run(client, call)


def count(client: redis.Redis, number: int, owner: str = "a") -> int:
    call = calls.part_batch(
        KEYS, "t", "batch_1", owner=owner, number=number, num_answered=4, num_failed=1, usage=USAGE
    )
    return run(client, call)


def read(client: redis.Redis) -> Batch:
    found = Batch.read("batch_1", client.hgetall(KEYS.batch_object("t", "batch_1")))
    assert found is not None
    return found


def test_what_was_accepted_is_accepted_once(client: redis.Redis) -> None:
    accept(client)
    before = client.hgetall(KEYS.batch_object("t", "batch_1"))
    assert not run(client, calls.put_file(KEYS, "t", FILE, ttl_ms=5))
    assert run(client, calls.create_batch(KEYS, "t", BATCH)) == (0, "batch_1")
    assert client.hgetall(KEYS.batch_object("t", "batch_1")) == before
    assert read(client).metadata == {"a": "b"}


def test_a_batch_with_a_key_is_accepted_once_under_any_id(client: redis.Redis) -> None:
    accept(client)
    keyed = replace(BATCH, batch_id="batch_2", idempotency_key="k")
    assert run(client, calls.create_batch(KEYS, "t", keyed)) == (1, "batch_2")
    again = replace(keyed, batch_id="batch_3", input_file_id="file-1")
    assert run(client, calls.drop_file(KEYS, "t", "file-1"))
    assert run(client, calls.create_batch(KEYS, "t", again)) == (0, "batch_2")
    for other in ({"metadata": {}}, {"endpoint": "/v1/embeddings"}, {"input_file_id": "file-2"}):
        with pytest.raises(IdempotencyConflict, match="batch_2"):
            run(client, calls.create_batch(KEYS, "t", replace(again, **other)))
    assert client.zrange(KEYS.batch_objects("t"), 0, -1) == [b"batch_1", b"batch_2"]


def test_a_batch_needs_its_input(client: redis.Redis) -> None:
    with pytest.raises(NoSuchObject):
        run(client, calls.create_batch(KEYS, "t", BATCH))
    assert not client.exists(KEYS.batch_object("t", "batch_1"), KEYS.active_batches)


def test_only_one_works_on_a_batch_until_its_lease_is_over_or_given_up(
    client: redis.Redis,
) -> None:
    accept(client)
    assert lease(client, "a") and lease(client, "a") and not lease(client, "b")
    client.hset(KEYS.batch_object("t", "batch_1"), "le", server_ms(client))
    assert lease(client, "b") and not lease(client, "a")
    assert lease(client, "b", 0) and lease(client, "a")


def test_who_has_lost_the_lease_changes_nothing(client: redis.Redis) -> None:
    accept(client)
    assert lease(client, "b")
    before = client.hgetall(KEYS.batch_object("t", "batch_1"))
    assert turn(client, "validating", "in_progress", "a") == (-1, "validating")
    assert count(client, 0, "a") == -1
    assert client.hgetall(KEYS.batch_object("t", "batch_1")) == before


def test_a_move_and_a_count_happen_once(client: redis.Redis) -> None:
    accept(client)
    assert lease(client)
    assert turn(client, "validating", "in_progress") == (1, "in_progress")
    moved = read(client)
    assert turn(client, "validating", "in_progress") == (1, "in_progress")
    assert turn(client, "validating", "finalizing") == (0, "in_progress")
    assert read(client) == moved and moved.total == 5
    assert [count(client, 0), count(client, 0), count(client, 1)] == [1, 0, 1]
    found = read(client)
    assert (found.num_answered, found.num_failed) == (8, 2)
    assert found.usage == BatchUsage(6, 4, 2)


def test_what_is_told_of_the_progress_never_goes_back(client: redis.Redis) -> None:
    accept(client)
    assert lease(client, cursor=3, num_answered=7, num_failed=2)
    assert lease(client, cursor=1, num_answered=5, num_failed=3)
    found = read(client)
    assert (found.cursor, found.num_answered, found.num_failed) == (3, 7, 3)


def test_the_end_of_a_batch_is_told_where_it_asked_for_it(client: redis.Redis) -> None:
    assert run(client, calls.put_file(KEYS, "t", FILE, ttl_ms=10**9))
    url = "https://example.com/done"
    assert run(client, calls.create_batch(KEYS, "t", replace(BATCH, callback_url=url)))
    assert lease(client)
    turn(client, "validating", "completed")
    [(_, entry)] = client.xrange(KEYS.outbox)
    assert (entry[b"b"], entry[b"u"]) == (b"batch_1", url.encode())
    event = read_entry(entry)
    assert event is not None
    assert json.loads(event.body)["data"] == {"id": "batch_1", "metadata": {"a": "b"}}


def test_an_end_is_the_last_word(client: redis.Redis) -> None:
    client.hset(KEYS.hooks("t"), "on", 1)
    accept(client)
    assert lease(client, num_answered=9)
    assert count(client, 0) == 1
    assert turn(client, "validating", "completed") == (1, "completed")
    assert turn(client, "validating", "completed") == (1, "completed")
    assert not lease(client) and count(client, 1) == -1
    assert run(client, stop()) == (0, "completed")
    found = read(client)
    # What was told of lines that are in no part is forgotten.
    assert (found.state, found.num_answered) == ("completed", 4)
    assert client.xlen(KEYS.outbox) == 1
    assert not client.exists(KEYS.batch_parts("t", "batch_1"), KEYS.active_batches)
    client.delete(KEYS.hooks("t"))


def stop() -> Call[tuple[int, str]]:
    return calls.stop_batch(KEYS, "t", "batch_1", output_id="file-2", error_id="file-3")


def test_a_batch_is_stopped_while_it_works_and_only_then(client: redis.Redis) -> None:
    assert run(client, stop()) == (0, "")
    accept(client)
    assert run(client, stop()) == (1, "cancelling") == run(client, stop())
    assert turn(client, "cancelling", "cancelled") == (1, "cancelled")
    assert run(client, stop()) == (0, "cancelled")


def test_nothing_is_forgotten_before_its_time(client: redis.Redis) -> None:
    accept(client)
    assert run(client, calls.drop_file(KEYS, "t", "file-1"))
    assert not run(client, calls.drop_file(KEYS, "t", "file-1"))
    # The batch may still read it.
    assert not run(client, calls.forget_file(KEYS, "t", "file-1"))
    assert not run(client, calls.forget_batch(KEYS, "t", "batch_1"))
    client.zadd(KEYS.stored_until, {"file t file-1": 1, "batch t batch_1": 1})
    assert run(client, calls.forget_file(KEYS, "t", "file-1"))
    assert run(client, calls.forget_batch(KEYS, "t", "batch_1"))
    assert not client.exists(KEYS.batch_object("t", "batch_1"), KEYS.batch_objects("t"))
    client.delete(KEYS.active_batches)
