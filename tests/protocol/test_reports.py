"""What workers tell of their prefix caches, and what they are told of them."""

from collections.abc import Iterator

import msgpack
import pytest
import redis

from support import shard
from support.shard import KEYS
from tidemill.protocol import calls
from tidemill.protocol.codec import decode, encode
from tidemill.protocol.functions import run
from tidemill.protocol.messages import KvEvents, KvSnapshot, WorkerStatus

WORKER = "wkr_a"
STATUS = WorkerStatus(num_running=1)
EVENTS = KvEvents(seq=3, stored=b"storedxy", evicted=b"evictedx")
SNAPSHOT = KvSnapshot(seq=3, digests=b"storedxyothers  ")


def report(client: redis.Redis, events: bytes = b"", snapshot: bytes = b"") -> None:
    call = calls.report(KEYS, worker_id=WORKER, status=STATUS, events=events, snapshot=snapshot)
    assert run(client, call) == 1


def test_a_status_alone_says_nothing_of_the_cache(redis_client: redis.Redis) -> None:
    report(redis_client)

    [(_, fields)] = redis_client.xrange(KEYS.status(WORKER))
    assert fields == {b"s": encode(STATUS)}
    assert not redis_client.exists(KEYS.kv_snapshot(WORKER))


def test_events_and_snapshot_go_with_their_status(redis_client: redis.Redis) -> None:
    report(redis_client, encode(EVENTS), encode(SNAPSHOT))

    [(_, fields)] = redis_client.xrange(KEYS.status(WORKER))
    assert decode(fields[b"s"], WorkerStatus) == STATUS
    assert decode(fields[b"k"], KvEvents) == EVENTS
    assert decode(redis_client.get(KEYS.kv_snapshot(WORKER)), KvSnapshot) == SNAPSHOT


def test_events_without_a_snapshot_leave_the_last_one(redis_client: redis.Redis) -> None:
    report(redis_client, encode(EVENTS), encode(SNAPSHOT))
    report(redis_client, encode(KvEvents(seq=4)))

    assert redis_client.get(KEYS.kv_snapshot(WORKER)) == encode(SNAPSHOT)


def test_a_beat_keeps_the_snapshot_as_long_as_the_stream(redis_client: redis.Redis) -> None:
    report(redis_client, encode(EVENTS), encode(SNAPSHOT))
    for key in (KEYS.status(WORKER), KEYS.kv_snapshot(WORKER)):
        assert 0 < redis_client.pttl(key) <= calls.LOG_TTL_MS
        redis_client.pexpire(key, 60_000)
    beat = calls.beat(
        KEYS, worker_id=WORKER, model="m", tokenizer_digest="t", lease_ms=1000, jobs=()
    )

    run(redis_client, beat)

    for key in (KEYS.status(WORKER), KEYS.kv_snapshot(WORKER)):
        assert redis_client.pttl(key) > 60_000


def test_a_worker_that_leaves_takes_its_snapshot_along(redis_client: redis.Redis) -> None:
    report(redis_client, encode(EVENTS), encode(SNAPSHOT))

    run(redis_client, calls.deregister(KEYS, worker_id=WORKER, cursor="0-0"))

    assert not redis_client.exists(KEYS.status(WORKER), KEYS.kv_snapshot(WORKER))


def test_a_hint_follows_the_commands_before_it(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    shard.dispatch(redis_client, job_id, shard.lead(redis_client), WORKER)
    refs = {b"12345678": 7, b"abcdefgh": 0}

    assert run(redis_client, calls.hint(KEYS, worker_id=WORKER, refs=refs))

    [_, (_, fields)] = redis_client.xrange(KEYS.commands(WORKER))
    assert fields[b"k"] == b"hint"
    assert msgpack.unpackb(fields[b"h"], strict_map_key=False) == refs
    assert 0 < redis_client.pttl(KEYS.commands(WORKER)) <= calls.LOG_TTL_MS
    shard.cancel(redis_client, job_id, WORKER)


def test_a_worker_that_never_had_a_command_is_not_hinted_at(redis_client: redis.Redis) -> None:
    assert not run(redis_client, calls.hint(KEYS, worker_id=WORKER, refs={b"12345678": 7}))

    assert not redis_client.exists(KEYS.commands(WORKER))


@pytest.fixture
def full_memory(redis_client: redis.Redis) -> Iterator[None]:
    """A server that has no memory left."""
    redis_client.xadd(KEYS.commands(WORKER), {"k": "drain"})
    redis_client.config_set("maxmemory", 1)
    yield
    redis_client.config_set("maxmemory", 0)


def test_reports_and_hints_go_on_when_memory_is_full(
    redis_client: redis.Redis, full_memory: None
) -> None:
    report(redis_client, encode(EVENTS), encode(SNAPSHOT))
    assert run(redis_client, calls.hint(KEYS, worker_id=WORKER, refs={b"12345678": 7}))
