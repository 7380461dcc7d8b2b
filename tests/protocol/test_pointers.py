"""Whatever puts a job on its queue says the same of it."""

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.messages import JobTerms

# Their jobs do not end.
pytestmark = pytest.mark.leaks_keys

HOUR = 3_600_000
TOLD = {b"o": b"64", b"g": b"1", b"p": b"0", b"c": b"3", b"m": b"m", b"s": b"0"}


def pointer(client: redis.Redis) -> dict[bytes, bytes]:
    """The fields of the only pointer."""
    [(_, fields)] = client.xrange(KEYS.ingress(QUEUE))
    return dict(fields)


def submit(client: redis.Redis, **terms: int) -> str:
    return shard.submit(
        client, terms=JobTerms(**terms), max_output=64, hint_depth=1, routing_key=b"12345678"
    )


def expected(client: redis.Redis, job_id: str, attempts: int) -> dict[bytes, bytes]:
    submitted = int(client.hget(KEYS.job(job_id), "ts") or 0)
    own = {b"j": job_id.encode(), b"h": b"12345678", b"a": b"%d" % attempts}
    return TOLD | own | {b"d": b"%d" % (submitted + HOUR)}


def test_a_new_job_tells_its_bounds(redis_client: redis.Redis) -> None:
    job_id = submit(redis_client, deadline_ms=HOUR)

    assert pointer(redis_client) == expected(redis_client, job_id, attempts=0)


def test_a_job_without_bounds_says_none(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)

    fields = pointer(redis_client)
    assert (fields[b"o"], fields[b"d"], fields[b"g"]) == (b"0", b"0", b"0")
    assert not {b"mt", b"g", b"dl"} & set(redis_client.hkeys(KEYS.job(job_id)))


def test_a_delayed_job_tells_its_bounds_once_it_may_run(redis_client: redis.Redis) -> None:
    job_id = submit(redis_client, deadline_ms=HOUR, delay_ms=HOUR // 2)
    redis_client.zadd(KEYS.delayed, {job_id: 1})

    assert shard.promote(redis_client, job_id)

    assert pointer(redis_client) == expected(redis_client, job_id, attempts=0)


@pytest.mark.parametrize("how", ["release", "nack", "reap"])
def test_a_job_that_comes_back_tells_its_bounds_again(redis_client: redis.Redis, how: str) -> None:
    job_id = submit(redis_client, deadline_ms=HOUR)
    fence = shard.dispatch(redis_client, job_id, shard.lead(redis_client)).fence
    if how == "release":
        assert shard.release(redis_client, job_id, fence)
    elif how == "reap":
        shard.expire_lease(redis_client, job_id)
        assert shard.reap(redis_client, job_id) == 1
    else:
        assert shard.nack(redis_client, job_id, fence) is calls.NackOutcome.DELAYED
        redis_client.zadd(KEYS.delayed, {job_id: 1})
        assert shard.promote(redis_client, job_id)

    assert pointer(redis_client) == expected(redis_client, job_id, attempts=1)


def test_a_job_from_before_these_fields_comes_back_without_bounds(
    redis_client: redis.Redis,
) -> None:
    job_id = submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, shard.lead(redis_client)).fence
    redis_client.hdel(KEYS.job(job_id), "mt", "g")

    assert shard.release(redis_client, job_id, fence)

    fields = pointer(redis_client)
    assert (fields[b"o"], fields[b"d"], fields[b"g"]) == (b"0", b"0", b"0")


def test_an_admitted_entry_of_the_front_door_tells_its_bounds(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    run(redis_client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    entry = redis_client.xadd(KEYS.front_door, {"v": "1", "body": "{}"}).decode()
    job = calls.NewJob("job", shard.REQUEST, max_output=64)

    admitted = run(redis_client, calls.admit(KEYS, job, epoch=epoch, entry_id=entry))

    assert admitted is not None and admitted.created
    assert pointer(redis_client)[b"o"] == b"64"
