"""Two versions of the library on one server and on the same jobs."""

from collections.abc import Iterator

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from support.versions import drop_versions, load_versions, run_version
from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.library import library_source

pytestmark = pytest.mark.leaks_keys

OLD, NEW = 2, 3


@pytest.fixture
def both(redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """A server in the middle of an upgrade."""
    load_versions(redis_client, (NEW,))
    yield redis_client
    drop_versions(redis_client, (NEW,))


def test_a_version_is_the_same_code_under_another_name() -> None:
    assert library_source(NEW) == library_source(OLD).replace("tm2", "tm3")
    assert "tmN" not in library_source(NEW)


def test_a_job_passes_through_processes_of_two_versions(both: redis.Redis) -> None:
    epoch = run_version(both, calls.lead(KEYS, scheduler_id="s", lease_ms=60_000), NEW)
    assert shard.lead(both, "other") == 0
    job_id = shard.submit(both)
    dispatch = calls.dispatch(
        KEYS,
        job_id=job_id,
        queue=QUEUE,
        entry_id=shard.entry_of(both, job_id),
        worker_id="wkr_a",
        epoch=epoch,
        lease_ms=60_000,
    )
    fence = run_version(both, dispatch, NEW).fence
    assert shard.append(both, job_id, fence, 0, 2).accepted
    again = calls.append(KEYS, worker_id="wkr_a", chunks=[(job_id, fence, shard.make_chunk(0, 2))])
    assert run_version(both, again, NEW)[0].num_tokens == 2
    ref = shard.ref_of(both, job_id)
    pause = shard.NO_PAUSE
    nack = calls.nack(KEYS, ref, fence=fence, worker_id="wkr_a", error="e", pause=pause)
    assert run_version(both, nack, NEW) is calls.NackOutcome.DELAYED
    assert run(both, nack) is calls.NackOutcome.NOT_OURS
    both.zadd(KEYS.delayed, {job_id: 1})
    assert shard.promote(both, job_id)
    fence = shard.dispatch(both, job_id, epoch).fence
    cancel = calls.cancel(KEYS, ref, worker_id="wkr_a", end=shard.CANCELLED)
    assert run_version(both, cancel, NEW) == (1, "cancelled")
    assert not shard.finish(both, job_id, fence, 2).accepted
    assert shard.read_log(both, job_id).terminals == ["cancelled"]
    kept = sum(int(member.split()[0]) for member in both.zrange(KEYS.ended, 0, -1))
    assert both.hgetall(KEYS.counters) == {b"rb": b"%d" % kept}


def test_a_repeated_submit_finds_the_job_of_another_version(both: redis.Redis) -> None:
    run(both, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    job = calls.NewJob(new_job_id(), shard.REQUEST, idempotency_key="k", body_digest="b")
    assert run_version(both, calls.submit(KEYS, job), NEW).created
    assert not run(both, calls.submit(KEYS, job)).created
    assert shard.submit(both, idempotency_key="k", body_digest="b") == job.job_id


def test_each_version_announces_itself(both: redis.Redis) -> None:
    shard.lead(both)
    run_version(both, calls.lead(KEYS, scheduler_id="sch_test", lease_ms=1000), NEW)
    assert both.zrange(KEYS.libraries, 0, -1) == [b"tm2", b"tm3"]


def test_dropping_the_old_version_leaves_the_new_one_at_work(both: redis.Redis) -> None:
    job_id = shard.submit(both)
    both.function_delete("tm2")
    ref = calls.JobRef(job_id, QUEUE)
    cancel = calls.cancel(KEYS, ref, worker_id="", end=shard.CANCELLED)
    with pytest.raises(redis.ResponseError, match="Function not found"):
        run(both, cancel)
    assert run_version(both, cancel, NEW) == (1, "cancelled")
