"""Statuses may overtake each other; what they tell of sequences and prefixes is never lost."""

from dataclasses import dataclass

import pytest
import redis

from support.fake_engine import make_seq
from support.kv_reader import KvReader, split
from support.shard import KEYS
from support.wait import wait_until
from support.worker_rig import Rig, make_request
from tidemill.protocol import calls
from tidemill.protocol.codec import MAX_RESULT_BYTES, decode
from tidemill.protocol.functions import run
from tidemill.protocol.messages import FinishedSequence, KvEvents, KvSnapshot, WorkerStatus
from tidemill.protocol.prefix import hash_blocks, routing_key, salt_keys
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.shell.alarm import Alarm
from tidemill_gpuworker.shell.cache_news import ENTRIES_PER_SNAPSHOT, CacheNews, CacheObserver
from tidemill_gpuworker.shell.status import StatusReporter

pytestmark = pytest.mark.leaks_keys


class FlakyRedis:
    """Stands in for a client: the next ``errors`` meet its commands, done or not."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.errors: list[tuple[str, Exception]] = []

    def execute_command(self, *command: object) -> object:
        when, error = self.errors.pop(0) if self.errors else ("never", None)
        if when == "before" and error:
            raise error
        reply = self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        if when == "after" and error:
            raise error
        return reply


@dataclass
class Bench:
    """A reporter, and what the server has of it."""

    client: redis.Redis

    def __post_init__(self) -> None:
        self.flaky = FlakyRedis(self.client)
        self.reporter = StatusReporter(self.flaky, KEYS, "wkr_a", Alarm())  # type: ignore[arg-type]

    def report(self, number: int, news: CacheNews | None = None) -> None:
        """Report a status that is known by its number, and a sequence of the same."""
        finished = (FinishedSequence(job_id=f"job_{number}"),)
        self.reporter.report(WorkerStatus(num_running=number, finished=finished), news)

    def entries(self) -> list[tuple[WorkerStatus, KvEvents | None]]:
        return read(self.client, "wkr_a")


def read(client: redis.Redis, worker_id: str) -> list[tuple[WorkerStatus, KvEvents | None]]:
    """The entries of a status stream."""
    entries = client.xrange(KEYS.status(worker_id))
    return [
        (decode(f[b"s"], WorkerStatus), decode(f[b"k"], KvEvents) if b"k" in f else None)
        for _, f in entries
    ]


def news(seq: int, *, with_snapshot: bool = False) -> CacheNews:
    events = KvEvents(seq=seq, stored=seq.to_bytes(8, "big"))
    snapshot = KvSnapshot(seq=seq, digests=events.stored) if with_snapshot else None
    return CacheNews(events, snapshot)


def job_ids(entries: list[tuple[WorkerStatus, KvEvents | None]]) -> list[str]:
    return [sequence.job_id for status, _ in entries for sequence in status.finished]


@pytest.fixture
def bench(redis_client: redis.Redis) -> Bench:
    return Bench(redis_client)


def test_finished_sequences_outlive_the_status_that_was_overtaken(bench: Bench) -> None:
    for number in (1, 2, 3):
        bench.report(number)
    assert bench.reporter.flush() == 1
    bench.report(4)
    assert bench.reporter.flush() == 1
    assert [status.num_running for status, _ in bench.entries()] == [3, 4]
    assert job_ids(bench.entries()) == ["job_1", "job_2", "job_3", "job_4"]


def test_a_refused_status_passes_its_sequences_on(bench: Bench) -> None:
    bench.report(1)
    bench.flaky.errors = [("before", redis.ResponseError("OOM"))]
    with pytest.raises(redis.ResponseError):
        bench.reporter.flush()
    assert bench.reporter.has_work
    bench.report(2)
    bench.reporter.flush()
    assert [status.num_running for status, _ in bench.entries()] == [2]
    assert job_ids(bench.entries()) == ["job_1", "job_2"]
    assert not bench.reporter.has_work


def test_a_status_reported_while_one_is_written_keeps_only_its_own_sequences(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = bench.reporter._send

    def report_and_send(status: WorkerStatus, news: CacheNews | None) -> None:
        monkeypatch.setattr(bench.reporter, "_send", send)
        bench.report(2)
        send(status, news)

    monkeypatch.setattr(bench.reporter, "_send", report_and_send)
    bench.report(1)
    assert bench.reporter.flush() == 2
    assert job_ids(bench.entries()) == ["job_1", "job_2"]


def test_batches_of_overtaken_statuses_are_written_one_by_one(bench: Bench) -> None:
    bench.report(1, news(1))
    assert bench.reporter.takes_news
    bench.report(2, news(2))
    assert not bench.reporter.takes_news
    assert bench.reporter.flush() == 2
    assert bench.reporter.takes_news
    statuses, batches = zip(*bench.entries(), strict=True)
    assert [batch.seq for batch in batches if batch] == [1, 2]
    assert [status.num_running for status in statuses] == [2, 2]
    assert job_ids(bench.entries()) == ["job_1", "job_2"]


@pytest.mark.parametrize("error", [redis.ResponseError("OOM"), redis.ConnectionError("away")])
def test_a_batch_that_was_not_taken_is_written_once_and_in_order(
    bench: Bench, error: redis.RedisError
) -> None:
    bench.report(1, news(1))
    bench.report(2, news(2))
    bench.flaky.errors = [("before", error), ("never", error), ("before", error)]
    for _ in range(2):
        with pytest.raises(type(error)):
            bench.reporter.flush()
    bench.reporter.flush()
    assert [batch.seq for _, batch in bench.entries() if batch] == [1, 2]


def test_a_batch_whose_reply_was_lost_comes_again_as_it_was(bench: Bench) -> None:
    bench.report(1, news(1))
    bench.flaky.errors = [("after", redis.ConnectionError("away"))]
    with pytest.raises(redis.ConnectionError):
        bench.reporter.flush()
    bench.report(2, news(2))
    bench.reporter.flush()
    batches = [batch for _, batch in bench.entries() if batch]
    assert [batch.seq for batch in batches] == [1, 1, 2]
    assert batches[0] == batches[1]


def test_a_snapshot_is_kept_beside_the_stream_and_expires_like_it(bench: Bench) -> None:
    key = KEYS.kv_snapshot("wkr_a")
    bench.report(1, news(1, with_snapshot=True))
    bench.report(2, news(2))
    bench.reporter.flush()
    snapshot = decode(bench.client.get(key) or b"", KvSnapshot)
    assert (snapshot.seq, snapshot.digests) == (1, bytes(7) + b"\x01")
    assert 0 < bench.client.pttl(key) <= bench.client.pttl(KEYS.status("wkr_a")) + 1000


class Cache(BlockManager):
    """A prefix cache in which the test makes prefixes come and go."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)

    def change(self, number: int) -> None:
        self._pool.routing.add(number.to_bytes(32, "little"))


def test_the_first_batch_comes_with_a_snapshot_and_many_entries_later_the_next() -> None:
    cache = Cache()
    observer = CacheObserver(cache)
    assert [observer.observe() for _ in range(3)] == [None] * 3
    cache.change(1)
    first = observer.observe()
    assert first is not None and first.events is not None and first.snapshot is not None
    assert first.snapshot.digests == first.events.stored
    seen = []
    for number in range(2, 2 + 2 * ENTRIES_PER_SNAPSHOT):
        cache.change(number)
        told = observer.observe()
        assert told is not None and told.events is not None
        seen.append(told.snapshot is not None)
    assert [index for index, has in enumerate(seen, 1) if has] == [
        ENTRIES_PER_SNAPSHOT,
        2 * ENTRIES_PER_SNAPSHOT,
    ]


def test_a_quiet_cache_repeats_its_snapshot_before_it_expires() -> None:
    cache = Cache()
    observer = CacheObserver(cache)
    cache.change(1)
    observer.observe()
    told = [observer.observe() for _ in range(ENTRIES_PER_SNAPSHOT)]
    assert told[:-1] == [None] * (ENTRIES_PER_SNAPSHOT - 1)
    assert told[-1] == CacheNews(None, cache.snapshot())


def test_a_cache_that_never_held_anything_has_no_snapshot() -> None:
    observer = CacheObserver(Cache())
    assert not any(observer.observe() for _ in range(2 * ENTRIES_PER_SNAPSHOT))


def departed(rig: Rig) -> dict[str, FinishedSequence]:
    """The sequences that a worker told of."""
    entries = read(rig.client, rig.worker_id)
    return {seq.job_id: seq for status, _ in entries for seq in status.finished}


def test_a_worker_tells_what_its_cache_holds_and_which_jobs_left(
    redis_client: redis.Redis, redis_url: str, epoch: int
) -> None:
    with Rig(redis_client, redis_url, epoch, num_blocks=64).running() as rig:
        rig.runner.run_free()
        prompts = [tuple(range(base, base + 40)) for base in range(100, 1100, 100)]
        jobs = [rig.give(make_request(prompt, num_tokens=2)) for prompt in prompts]
        bad = rig.give(make_request(tuple(range(1, 129))))
        again = rig.give(make_request(prompts[-1], num_tokens=3))
        for job_id in (*jobs, again):
            rig.wait_for(job_id, "done")
        wait_until(lambda: set(departed(rig)) == {*jobs, bad, again})
        entries = read(redis_client, rig.worker_id)
        finished = departed(rig)
        snapshot = redis_client.get(KEYS.kv_snapshot(rig.worker_id)) or b""
    reader = KvReader()
    for _, events in entries:
        if events is not None:
            reader.apply(events)
    extra = salt_keys(b"\x07" * 16 + rig.card.revision.encode())
    keys = [split(routing_key(hash_blocks(prompt, 4, extra))) for prompt in prompts]
    known = {digest for key in keys for digest in key}
    assert reader.digests <= known
    # 64 blocks hold not even seven of these prompts, and the last one is among them.
    assert 2 <= len(reader.digests) <= 16
    assert set(keys[-1]) <= reader.digests
    assert decode(snapshot, KvSnapshot, max_bytes=MAX_RESULT_BYTES).seq == 1
    assert [finished[job_id].output_tokens for job_id in (*jobs, bad, again)] == [2] * 10 + [0, 3]


def test_a_hint_counts_as_a_command_and_reaches_the_cache(
    redis_client: redis.Redis, rig: Rig
) -> None:
    rig.runner.run_free()
    hinted = tuple(range(100, 130))
    job_id = rig.give(make_request(hinted, num_tokens=1))
    rig.wait_for(job_id, "done")
    extra = salt_keys(b"\x07" * 16 + rig.card.revision.encode())
    refs = dict.fromkeys(split(routing_key(hash_blocks(hinted, 4, extra))), 2)
    assert run(redis_client, calls.hint(KEYS, worker_id=rig.worker_id, refs=refs))
    last = redis_client.xrevrange(KEYS.commands(rig.worker_id), count=1)[0][0].decode()
    rig.wait_for_status(lambda status: status.last_command == last)
    # Its first routing hash stands for four blocks; all others are before them in the free list.
    blocks = rig.engine.step_scheduler.block_manager
    seq = make_seq(hinted)
    seq.extra_keys = extra
    kept = blocks.find_prefix(seq)[:4]
    assert list(blocks.free_blocks[-4:]) == kept[::-1]
