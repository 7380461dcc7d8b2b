"""What the scheduler knows of workers' prefix caches, whatever is lost on the way."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from support.caching_worker import CachingWorker
from support.known_caches import CacheRecorder
from support.shard import KEYS
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import ensure_library
from tidemill.protocol.messages import KvEvents
from tidemill.service.redis import connect, connect_async
from tidemill_scheduler.fleet import kv_watch
from tidemill_scheduler.fleet.kv_watch import CacheView, KvWatch

WORKER = "wkr_a"
STREAM, SNAPSHOT = KEYS.status(WORKER), KEYS.kv_snapshot(WORKER)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watch, "_RETRY_SECONDS", 0.0)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(redis_url, retries=0) as connection:
        yield connection


class Reader:
    """Reads one worker's stream as the daemon does, and can be made to miss entries."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._cursor = "0-0"
        self.scheduler = CacheRecorder()
        self.watch = KvWatch(client, KEYS, self.scheduler)

    @property
    def known(self) -> set[bytes]:
        """What the scheduler thinks the worker holds."""
        return self.scheduler.caches.get(WORKER, set())

    async def begin(self) -> None:
        """Begin with what can be read of the cache."""
        self.watch.add(WORKER, await self.watch.look(WORKER))

    async def read(self) -> None:
        """Read all new entries."""
        for entry_id, fields in await self._client.xrange(STREAM, f"({self._cursor}"):
            self._cursor = entry_id.decode()
            if b"k" in fields:
                self.watch.take(WORKER, fields[b"k"])

    async def catch_up(self) -> None:
        """Read and recover until there is nothing to do."""
        await self.read()
        await self.watch.recover()
        await self.read()


@pytest.fixture
async def reader(client: redis.asyncio.Redis, redis_client: redis.Redis) -> Reader:
    return Reader(client)


@pytest.fixture
def worker(redis_client: redis.Redis) -> CachingWorker:
    return CachingWorker(redis_client, WORKER)


def num_gaps() -> float:
    return REGISTRY.get_sample_value("tidemill_scheduler_kv_gaps_total") or 0.0


def hashes(*numbers: int) -> set[bytes]:
    return {number.to_bytes(8) for number in numbers}


async def test_events_are_followed_from_the_first(reader: Reader, worker: CachingWorker) -> None:
    await reader.begin()
    worker.change(hashes(1, 2))
    worker.change(hashes(3), hashes(1))
    await reader.read()

    assert reader.known == hashes(2, 3)
    assert reader.scheduler.num_resets == 0


async def test_a_worker_that_tells_nothing_of_its_cache_is_left_to_guesses(
    reader: Reader, worker: CachingWorker
) -> None:
    worker.report(num_running=1)
    await reader.begin()
    await reader.read()

    assert reader.scheduler.caches == {}
    assert not reader.watch.is_due


async def test_a_new_reader_begins_with_the_snapshot_and_the_events_after_it(
    reader: Reader, worker: CachingWorker
) -> None:
    for number in range(300):
        worker.change(hashes(number + 10), hashes(number))
    assert worker.held == hashes(*range(300, 310))

    await reader.begin()

    assert reader.known == worker.held
    # What the snapshot or the tail included comes again, and changes nothing.
    await reader.read()
    assert reader.known == worker.held and not reader.watch.is_due


async def test_entries_without_events_may_lie_between(
    reader: Reader, worker: CachingWorker
) -> None:
    worker.change(hashes(1))
    worker.change(hashes(2))
    for _ in range(2 * kv_watch._PAGE):
        worker.report()

    await reader.begin()

    assert reader.known == hashes(1, 2)


async def test_a_gap_is_filled_from_snapshot_and_stream(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    worker.change(hashes(1))
    await reader.begin()
    lost = redis_client.xinfo_stream(STREAM)["last-generated-id"]
    worker.change(hashes(2), hashes(1))
    [(entry_id, _)] = redis_client.xrange(STREAM, b"(" + lost)
    redis_client.xdel(STREAM, entry_id)
    redis_client.set(SNAPSHOT, worker.snapshot(), keepttl=True)
    worker.change(hashes(3))

    await reader.read()
    assert reader.known == hashes(1), "events after a gap were taken"
    assert reader.watch.is_due
    await reader.watch.recover()

    assert reader.known == worker.held == hashes(2, 3)
    assert not reader.watch.is_due


async def test_where_the_stream_was_trimmed_behind_the_snapshot_nothing_is_claimed(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    for number in range(6):
        worker.change(hashes(number))
    redis_client.xtrim(STREAM, maxlen=2, approximate=False)

    await reader.begin()

    assert reader.known == hashes(4, 5)
    worker.change(hashes(6))
    await reader.read()
    assert reader.known == hashes(4, 5, 6)


async def test_a_report_that_was_written_twice_counts_once(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    worker.change(hashes(1))
    for number in range(2, 6):
        worker.change(hashes(number), hashes(number - 1))
        redis_client.xadd(STREAM, redis_client.xrevrange(STREAM, count=1)[0][1])

    await reader.begin()
    assert reader.known == worker.held == hashes(5)
    worker.change(hashes(6), hashes(5))
    redis_client.xadd(STREAM, redis_client.xrevrange(STREAM, count=1)[0][1])
    await reader.read()

    assert reader.known == hashes(6) and not reader.watch.is_due


async def test_where_an_entry_behind_the_snapshot_is_missing_nothing_before_it_is_claimed(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    for number in range(5):
        worker.change(hashes(number))
    redis_client.xdel(STREAM, redis_client.xrange(STREAM)[2][0])

    await reader.begin()

    assert reader.known == hashes(3, 4)


async def test_a_gap_without_a_snapshot_claims_only_what_came_after_it(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    worker.change(hashes(1))
    await reader.begin()
    worker.change(hashes(2))
    redis_client.delete(SNAPSHOT, STREAM)
    worker.change(hashes(3))

    await reader.catch_up()

    assert reader.known == hashes(3)


async def test_a_newer_snapshot_completes_what_was_lost(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    for number in range(6):
        worker.change(hashes(number))
    redis_client.xtrim(STREAM, maxlen=2, approximate=False)
    await reader.begin()
    worker.change(hashes(6))
    redis_client.xtrim(STREAM, maxlen=1, approximate=False)
    await reader.catch_up()
    await reader.catch_up()
    assert reader.known == hashes(4, 5, 6), "an old snapshot completes and spoils nothing"

    redis_client.set(SNAPSHOT, worker.snapshot(), keepttl=True)
    worker.change(hashes(7), hashes(0))
    await reader.catch_up()

    assert reader.known == worker.held == hashes(1, 2, 3, 4, 5, 6, 7)
    assert not reader.watch.is_due


async def test_a_lost_snapshot_claims_only_what_was_seen(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    for number in range(3):
        worker.change(hashes(number))
    redis_client.delete(SNAPSHOT)
    redis_client.xtrim(STREAM, maxlen=2, approximate=False)

    await reader.begin()

    assert reader.known == hashes(1, 2)


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\xff", b"\x01\x80", b"\x09" + encode(KvEvents(seq=2))[1:], b"\x01\x81\xa3seq\x00"],
)
async def test_malformed_events_are_a_gap_that_is_told_once(
    reader: Reader,
    worker: CachingWorker,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    nonsense: bytes,
) -> None:
    worker.change(hashes(1))
    await reader.begin()
    for _ in range(3):
        redis_client.xadd(STREAM, {"s": b"", "k": nonsense})
        await reader.catch_up()
    worker.change(hashes(2))
    await reader.catch_up()
    redis_client.set(SNAPSHOT, worker.snapshot(), keepttl=True)
    worker.change(hashes(3), hashes(1))
    await reader.catch_up()

    assert reader.known == worker.held == hashes(2, 3)
    told = [r for r in caplog.records if "cannot be followed" in r.message]
    assert len(told) == 1 and WORKER in told[0].getMessage()
    assert told[0].levelno == logging.WARNING


@pytest.mark.leaks_keys
@pytest.mark.parametrize("command", ["set", "rpush"])
async def test_keys_of_another_type_do_not_stop_anything(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis, command: str
) -> None:
    worker.change(hashes(1))
    redis_client.delete(SNAPSHOT)
    redis_client.execute_command(command, SNAPSHOT, b"nonsense")
    redis_client.expire(SNAPSHOT, 60)

    await reader.begin()
    redis_client.delete(SNAPSHOT)
    worker.change(hashes(2))
    await reader.catch_up()
    await reader.catch_up()

    assert reader.known == hashes(1, 2)


async def test_caches_are_read_anew_a_few_at_a_time(
    client: redis.asyncio.Redis, redis_client: redis.Redis
) -> None:
    ids = [f"wkr_{number}" for number in range(40)]
    for worker_id in ids:
        CachingWorker(redis_client, worker_id).change(hashes(1))
    scheduler = CacheRecorder()
    watch = KvWatch(client, KEYS, scheduler)
    for worker_id in ids:
        watch.add(worker_id, CacheView())
        watch.take(worker_id, b"nonsense")

    sizes = []
    while watch.is_due:
        await watch.recover()
        sizes.append(len(scheduler.caches))

    assert sizes == [16, 32, 40]


async def test_a_cache_is_not_read_anew_all_the_time(
    reader: Reader,
    worker: CachingWorker,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_watch, "_RETRY_SECONDS", 3600.0)
    await reader.begin()
    before = num_gaps()
    for _ in range(5):
        redis_client.xadd(STREAM, {"s": b"", "k": b"nonsense"})
        await reader.read()

    assert not reader.watch.is_due
    assert num_gaps() == before + 1
    redis_client.delete(STREAM)


async def test_a_worker_that_is_gone_is_forgotten(
    reader: Reader, worker: CachingWorker, redis_client: redis.Redis
) -> None:
    await reader.begin()
    redis_client.xadd(STREAM, {"s": b"", "k": b"nonsense"})
    await reader.read()
    assert reader.watch.is_due
    reader.watch.remove(WORKER)
    worker.change(hashes(1))
    await reader.catch_up()

    assert reader.scheduler.caches == {} and not reader.watch.is_due


@pytest.fixture(scope="module")
def shared_url(valkey_server: object) -> Iterator[str]:
    """The address of the server that examples share."""
    yield valkey_server.url  # type: ignore[attr-defined]


CHANGE = st.tuples(
    st.just("change"), st.frozensets(st.integers(0, 9), max_size=3), st.integers(0, 9)
)
OTHER = st.sampled_from(
    ["read", "recover", "status", "lose", "trim", "repeat", "nonsense", "snapshot"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=st.lists(CHANGE | CHANGE | OTHER, max_size=25), period=st.integers(1, 5))
def test_a_cache_is_known_exactly_in_the_end_whatever_was_lost(
    shared_url: str, steps: list[object], period: int
) -> None:
    """Nothing is lost for good: a snapshot after the last loss makes the view complete."""
    with connect(shared_url) as sync:
        sync.flushdb()
        ensure_library(sync)
        asyncio.run(_play(shared_url, sync, steps, period))
        sync.flushdb()


async def _play(url: str, sync: redis.Redis, steps: list[object], period: int) -> None:
    worker = CachingWorker(sync, WORKER, period=period)
    async with connect_async(url, retries=0) as client:
        reader = Reader(client)
        await reader.begin()
        for step in steps:
            await _do(step, worker, reader, sync)
        worker.change(hashes(77))
        sync.set(SNAPSHOT, worker.snapshot())
        worker.change(hashes(78), hashes(77))
        for _ in range(2):
            await reader.catch_up()
        assert reader.known == worker.held
        assert not reader.watch.is_due


async def _do(step: object, worker: CachingWorker, reader: Reader, sync: redis.Redis) -> None:
    match step:
        case ("change", frozenset(stored), int(evicted)):
            worker.change(hashes(*stored), hashes(evicted))
        case "read":
            await reader.read()
        case "recover":
            await reader.watch.recover()
        case "status":
            worker.report()
        case "snapshot":
            sync.set(SNAPSHOT, worker.snapshot())
        case _:
            _spoil(step, sync)


def _spoil(step: object, sync: redis.Redis) -> None:
    newest = sync.xrevrange(STREAM, count=1)
    if step == "lose" and newest:
        sync.xdel(STREAM, newest[0][0])
    elif step == "repeat" and newest:
        sync.xadd(STREAM, newest[0][1])
    elif step == "trim":
        sync.xtrim(STREAM, maxlen=2, approximate=False)
    elif step == "nonsense":
        sync.xadd(STREAM, {"s": b"", "k": b"nonsense"})
