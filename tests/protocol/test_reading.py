"""How a leader reads its streams, and a worker that leaves its last commands."""

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.functions import run
from tidemill.protocol.keys import CONSUMER, GROUP

STREAM = KEYS.ingress(QUEUE)

pytestmark = pytest.mark.leaks_keys


def read(
    client: redis.Redis, epoch: int, position: str = "0-0", count: int = 10
) -> list[tuple[str, str | None]]:
    """Entry id and job of what lies behind a position; no job where the entry was deleted."""
    call = calls.read(KEYS, epoch=epoch, positions={STREAM: position}, count=count)
    [entries] = run(client, call).entries
    assert not isinstance(entries, calls.ReadError), entries
    return [(entry.decode(), f[b"j"].decode() if f else None) for entry, f in entries]


@pytest.fixture
def epoch(redis_client: redis.Redis) -> int:
    return shard.lead(redis_client)


def test_a_read_whose_reply_was_lost_may_be_made_again(
    redis_client: redis.Redis, epoch: int
) -> None:
    jobs = [shard.submit(redis_client) for _ in range(3)]
    first = read(redis_client, epoch, count=2)
    assert read(redis_client, epoch, count=2) == first
    [last] = read(redis_client, epoch, first[-1][0])
    assert [job for _, job in (*first, last)] == jobs
    assert read(redis_client, epoch, last[0]) == []


def test_what_came_after_a_lost_reply_is_not_passed_over(
    redis_client: redis.Redis, epoch: int
) -> None:
    jobs = [shard.submit(redis_client)]
    read(redis_client, epoch)
    jobs.append(shard.submit(redis_client))
    found: list[tuple[str, str | None]] = []
    while page := read(redis_client, epoch, found[-1][0] if found else "0-0"):
        found += page
    assert [job for _, job in found] == jobs


def test_a_deleted_entry_that_was_read_comes_without_its_fields(
    redis_client: redis.Redis, epoch: int
) -> None:
    shard.submit(redis_client)
    [(entry, _)] = read(redis_client, epoch)
    redis_client.xdel(STREAM, entry)
    assert read(redis_client, epoch) == [(entry, None)]
    assert run(redis_client, calls.acknowledge(STREAM, [entry])) == 0
    assert read(redis_client, epoch) == []


def test_an_old_leader_reads_nothing(redis_client: redis.Redis, epoch: int) -> None:
    shard.submit(redis_client)
    with pytest.raises(StaleEpoch):
        read(redis_client, epoch - 1)
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 0


def test_one_stream_without_a_group_does_not_hide_the_others(
    redis_client: redis.Redis, epoch: int
) -> None:
    job_id = shard.submit(redis_client)
    positions = {KEYS.ingress("p0:nobody"): "0", STREAM: "0"}
    reply = run(redis_client, calls.read(KEYS, epoch=epoch, positions=positions, count=1))
    missing, found = reply.entries
    assert isinstance(missing, calls.ReadError) and missing.message.startswith("NOGROUP")
    assert isinstance(found, list) and found[0][1] is not None
    assert found[0][1][b"j"].decode() == job_id
    assert reply.now_ms > 10**12


def test_acknowledged_entries_are_gone(redis_client: redis.Redis, epoch: int) -> None:
    for _ in range(2):
        shard.submit(redis_client)
    entries = [entry for entry, _ in read(redis_client, epoch)]
    assert run(redis_client, calls.acknowledge(STREAM, entries)) == 2
    assert redis_client.xlen(STREAM) == 0
    assert redis_client.xpending_range(STREAM, GROUP, "-", "+", 10, CONSUMER) == []


def test_reading_goes_on_when_memory_is_full(redis_client: redis.Redis, epoch: int) -> None:
    job_id = shard.submit(redis_client)
    redis_client.config_set("maxmemory", 1)
    [(entry, job)] = read(redis_client, epoch)
    assert job == job_id
    assert run(redis_client, calls.acknowledge(STREAM, [entry])) == 1
    redis_client.config_set("maxmemory", 0)


def test_a_leaving_worker_learns_what_it_has_not_read(
    redis_client: redis.Redis, epoch: int
) -> None:
    fences = {}
    for _ in range(2):
        job_id = shard.submit(redis_client)
        fences[job_id] = shard.dispatch(redis_client, job_id, epoch)
    first, second = fences
    cursor = fences[first].command_id
    call = calls.deregister(KEYS, worker_id="wkr_a", cursor=cursor)
    [(_, unread)] = run(redis_client, call)
    assert (unread[b"k"], unread[b"j"]) == (b"run", second.encode())
    assert not redis_client.exists(KEYS.commands("wkr_a"))
    assert run(redis_client, call) == []
    for job_id in fences:
        shard.cancel(redis_client, job_id, "wkr_a")
