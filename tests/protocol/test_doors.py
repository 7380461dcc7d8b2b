"""The doors for programs without the SDK, and what the leader says to everybody."""

import json

import pytest
import redis

from support import shard
from support.shard import KEYS
from support.wait import wait_until
from tidemill.protocol import calls
from tidemill.protocol.errors import StaleEpoch
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.keys import CONSUMER, GROUP
from tidemill.protocol.messages import JobTerms

pytestmark = pytest.mark.leaks_keys

DAY = 86400


def knock(client: redis.Redis, body: bytes = b"{}") -> str:
    """Leave an entry at the front door and read it as the leader does."""
    if not client.exists(KEYS.front_door):
        client.xgroup_create(KEYS.front_door, GROUP, "0", mkstream=True)
    entry = client.xadd(KEYS.front_door, {"v": "1", "body": body}).decode()
    client.xreadgroup(GROUP, CONSUMER, {KEYS.front_door: ">"})
    return entry


def test_an_entry_of_the_front_door_is_answered_once_and_taken_off(
    redis_client: redis.Redis,
) -> None:
    entry = knock(redis_client)
    reply = json.dumps({"job": "job_1"}).encode()
    answer = calls.answer(KEYS, entry_id=entry, reply=reply)
    assert [run(redis_client, answer) for _ in range(2)] == [True, False]
    assert redis_client.lrange(KEYS.front_reply(entry), 0, -1) == [reply]
    assert 0 < redis_client.ttl(KEYS.front_reply(entry)) <= DAY
    assert redis_client.xlen(KEYS.front_door) == 0
    assert redis_client.xpending(KEYS.front_door, GROUP)["pending"] == 0
    assert redis_client.xlen(KEYS.dead_letters) == 0


def test_a_refused_entry_becomes_one_dead_letter_with_the_head_of_its_body(
    redis_client: redis.Redis,
) -> None:
    body = b"x" * 20_000
    entry = knock(redis_client, body)
    answer = calls.answer(
        KEYS, entry_id=entry, reply=b'{"error": {}}', refusal="not JSON", body=body
    )
    assert [run(redis_client, answer) for _ in range(2)] == [True, False]
    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert letter[b"b"] == body[:16384]
    assert (letter[b"r"], letter[b"q"], letter[b"e"]) == (b"not JSON", b"front", entry.encode())


def test_an_entry_is_admitted_by_its_leader_until_it_is_answered(
    redis_client: redis.Redis,
) -> None:
    epoch, entry = shard.lead(redis_client), knock(redis_client)
    run(redis_client, calls.salt(KEYS, tenant="default", random=b"s" * 16))

    def admit(epoch: int) -> calls.Submitted | None:
        job = calls.NewJob(new_job_id(), shard.REQUEST, idempotency_key=f"front:{entry}")
        return run(redis_client, calls.admit(KEYS, job, epoch=epoch, entry_id=entry))

    with pytest.raises(StaleEpoch):
        admit(epoch - 1)
    first, again = admit(epoch), admit(epoch)
    assert first and again and (first.created, again.created) == (True, False)
    assert first.job_id == again.job_id
    run(redis_client, calls.answer(KEYS, entry_id=entry, reply=b"{}"))
    assert admit(epoch) is None
    assert redis_client.hgetall(KEYS.counters)[b"q:default"] == b"1"


def test_an_entry_that_was_never_there_is_not_answered(redis_client: redis.Redis) -> None:
    answer = calls.answer(KEYS, entry_id="1-1", reply=b"{}", refusal="odd")
    assert not run(redis_client, answer)
    assert redis_client.dbsize() == 0


def test_the_back_door_tells_each_job_that_ends_once(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "back:default", 100)
    epoch = shard.lead(redis_client)
    done = shard.submit(
        redis_client,
        idempotency_key="k",
        body_digest="b",
        terms=JobTerms(batch="b", max_retries=0),
    )
    fence = shard.dispatch(redis_client, done, epoch).fence
    for _ in range(2):
        shard.finish(redis_client, done, fence, 0, 3)
    cancelled = shard.submit(redis_client)
    for _ in range(2):
        shard.cancel(redis_client, cancelled)
    dead = shard.submit(redis_client, terms=JobTerms(max_retries=0))
    shard.nack(redis_client, dead, shard.dispatch(redis_client, dead, epoch).fence)
    late = shard.submit(redis_client, terms=JobTerms(deadline_ms=1000))
    redis_client.hset(KEYS.job(late), "dl", 1)
    redis_client.zadd(KEYS.due, {late: 1})
    shard.expire(redis_client, late)

    entries = [fields for _, fields in redis_client.xrange(KEYS.back_door("default"))]

    told = [tuple(fields[name].decode() for name in (b"j", b"s", b"r", b"n")) for fields in entries]
    assert told == [
        (done, "done", "stop", "3"),
        (cancelled, "cancelled", "cancelled", "0"),
        (dead, "dead", "error", "0"),
        (late, "expired", "deadline", "0"),
    ]
    assert (entries[0][b"b"], entries[0][b"k"]) == (b"b", b"k")
    assert entries[0][b"t"] == redis_client.hget(KEYS.job(done), "te")
    assert 6 * DAY < redis_client.ttl(KEYS.back_door("default")) <= 7 * DAY


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, False),
        ({"back:*": 10}, True),
        ({"back:*": 10, "back:default": 0}, False),
        ({"back:*": 0, "back:default": 10}, True),
        ({"back:else": 10}, False),
    ],
)
def test_the_back_door_is_open_where_its_setting_says_so(
    redis_client: redis.Redis, settings: dict[str, int], is_open: bool
) -> None:
    if settings:
        redis_client.hset(KEYS.settings, mapping=settings)
    shard.cancel(redis_client, shard.submit(redis_client))
    assert bool(redis_client.exists(KEYS.back_door("default"))) == is_open


def test_the_back_door_is_bounded(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.settings, "back:*", 1)
    nodes = int(redis_client.config_get("stream-node-max-entries")["stream-node-max-entries"])
    for _ in range(2 * nodes + 1):
        shard.cancel(redis_client, shard.submit(redis_client))
    assert redis_client.xlen(KEYS.back_door("default")) <= nodes + 1


def test_a_scheduler_fails_a_job_that_can_never_run(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    end = shard.JobEnd(state="failed", finish_reason="error", error="no such model")
    ref = shard.ref_of(redis_client, job_id)
    assert run(redis_client, calls.cancel(KEYS, ref, worker_id="", end=end)) == (1, "failed")
    assert shard.read_log(redis_client, job_id).terminals == ["failed"]
    assert not redis_client.hexists(KEYS.job(job_id), "req")


def test_jobs_that_workers_ended_are_counted_for_the_measures(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client, num_tokens=12)
    size = redis_client.hstrlen(KEYS.job(job_id), "req")
    fence = shard.dispatch(redis_client, job_id, shard.lead(redis_client)).fence
    for _ in range(2):
        shard.finish(redis_client, job_id, fence, 0)
    assert redis_client.hmget(KEYS.measures, "j", "t", "b") == [b"1", b"12", b"%d" % size]


def test_cancelled_and_expired_jobs_are_no_measure_of_the_workers(
    redis_client: redis.Redis,
) -> None:
    shard.cancel(redis_client, shard.submit(redis_client, num_tokens=12))
    running = shard.submit(redis_client, num_tokens=12)
    shard.dispatch(redis_client, running, shard.lead(redis_client))
    shard.cancel(redis_client, running, "wkr_a")
    expiring = shard.submit(redis_client, num_tokens=12, terms=JobTerms(deadline_ms=1))
    ref = shard.ref_of(redis_client, expiring)
    wait_until(lambda: run(redis_client, calls.expire(KEYS, ref, worker_id="")))

    for job_id, state in ((running, b"cancelled"), (expiring, b"expired")):
        assert redis_client.hget(KEYS.job(job_id), "st") == state
    assert redis_client.hmget(KEYS.measures, "j", "t", "b") == [None] * 3


def test_measures_replace_each_other_and_leave_the_counts(redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.measures, "j", 7)
    for level in ("fast", "fsync"):
        measures = calls.Measures(1.5, 2.5, 3.25, 4096, level, "run")
        run(redis_client, calls.measure(KEYS, measures))
    stored = redis_client.hgetall(KEYS.measures)
    assert {name.decode(): value.decode() for name, value in stored.items()} == {
        "j": "7",
        "rj": "1.500",
        "rt": "2.500",
        "rb": "3.250",
        "mb": "4096",
        "lv": "fsync",
        "rid": "run",
        "bk": "",
        "rp": "0.000000",
    }


def test_whoever_uses_the_library_says_so_for_a_day(redis_client: redis.Redis) -> None:
    shard.lead(redis_client)
    expiry = redis_client.zscore(KEYS.libraries, "tm2") or 0
    assert expiry - shard.server_ms(redis_client) == pytest.approx(DAY * 1000, abs=5_000)
    redis_client.zadd(KEYS.libraries, {"tm2": 1})
    shard.submit(redis_client)
    assert (redis_client.zscore(KEYS.libraries, "tm2") or 0) >= expiry
    # A server whose clock went back must not shorten it.
    redis_client.zadd(KEYS.libraries, {"tm2": 9e12})
    shard.lead(redis_client)
    assert redis_client.zscore(KEYS.libraries, "tm2") == 9e12


@pytest.mark.parametrize("bound", ["1.5", "nan", "inf", "1e20", "-3", "abc", ""])
def test_a_back_door_of_a_senseless_size_is_closed_and_jobs_end_all_the_same(
    redis_client: redis.Redis, bound: str
) -> None:
    redis_client.hset(KEYS.settings, "back:*", bound)
    job_id = shard.submit(redis_client)
    assert shard.cancel(redis_client, job_id) == (1, "cancelled")
    assert not redis_client.exists(KEYS.back_door("default"))


@pytest.mark.parametrize("name", ["jobs", "tokens", "rpm", "tpm", "bytes"])
@pytest.mark.parametrize("value", ["1e-300", "nan", "-5", "abc"])
def test_a_senseless_limit_is_no_limit(redis_client: redis.Redis, name: str, value: str) -> None:
    redis_client.hset(KEYS.settings, name if name == "bytes" else f"{name}:default", value)
    for _ in range(2):
        shard.submit(redis_client)
    assert not redis_client.exists(KEYS.rate_buckets("default"))


def test_a_job_ends_although_its_counters_are_damaged(redis_client: redis.Redis) -> None:
    epoch, job_id = shard.lead(redis_client), shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    redis_client.hset(KEYS.counters, mapping={"r:default": "abc", "rb": "x", "qb": "y"})
    assert shard.finish(redis_client, job_id, fence, 0).accepted
    assert redis_client.zscore(KEYS.running, job_id) is None
    assert redis_client.ttl(KEYS.job(job_id)) > 0
