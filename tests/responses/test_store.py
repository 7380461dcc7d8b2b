"""Records of responses: kept with an owner and a life, by the gateway's own user."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.acl_server import acl_server
from support.shard import KEYS
from tidemill._async_shared import AsyncShared
from tidemill.protocol.errors import InvalidRequest, MalformedMessage, NoSuchObject, QueueFull
from tidemill.protocol.ids import new_job_id
from tidemill.responses import record as records
from tidemill.responses.record import ResponseRecord, job_of, read_record, response_id
from tidemill.responses.store import LIFE_AFTER_END_SECONDS, LIFE_SECONDS, ResponseStore

RECORD = ResponseRecord({"model": "m"}, [{"type": "message", "id": "ü"}], {"tools": []})
OTHER = ResponseRecord({"model": "n"}, [], {})


@pytest.fixture
async def shared() -> AsyncIterator[AsyncShared]:
    made = AsyncShared(10)
    yield made
    await made.close()


async def test_a_record_is_kept_once_for_its_owner_until_it_goes_with_its_job(
    tmp_path: Path, shared: AsyncShared
) -> None:
    with acl_server(tmp_path / "acl") as server, server.client("tester") as redis:
        alice, bob = (
            ResponseStore(server.url("gateway"), tenant=name, shared=shared)
            for name in ("alice", "bob")
        )
        job_id = new_job_id()
        assert await alice.put(job_id, RECORD.encode()) is None
        assert await alice.put(job_id, OTHER.encode()) == RECORD
        assert await alice.get(job_id) == RECORD
        key = KEYS.response("alice", job_id)
        assert LIFE_AFTER_END_SECONDS < redis.ttl(key) <= LIFE_SECONDS
        await alice.note_end(job_id)
        assert 0 < redis.ttl(key) <= LIFE_AFTER_END_SECONDS
        with pytest.raises(NoSuchObject):
            await bob.get(job_id)
        await bob.delete(job_id)
        assert await alice.get(job_id) == RECORD
        await alice.delete(job_id)
        with pytest.raises(NoSuchObject):
            await alice.get(job_id)
        assert server.refusals() == []


async def test_records_take_no_more_than_their_tenant_and_all_may_have(
    tmp_path: Path, shared: AsyncShared
) -> None:
    with acl_server(tmp_path / "acl") as server, server.client("tester") as redis:
        alice, bob = (
            ResponseStore(server.url("gateway"), tenant=name, shared=shared)
            for name in ("alice", "bob")
        )
        size = len(RECORD.encode()) + 400
        redis.hset(KEYS.settings, "response_bytes:alice", 2 * size)
        first, second, third = (new_job_id() for _ in range(3))
        await alice.put(first, RECORD.encode())
        await alice.put(first, RECORD.encode())
        await alice.put(second, RECORD.encode())
        with pytest.raises(QueueFull, match=f"takes {2 * size} bytes, the limit is {2 * size}"):
            await alice.put(third, RECORD.encode())
        await bob.put(third, RECORD.encode())
        # Those that are deleted make room, and those that have gone by themselves.
        await alice.delete(second)
        await alice.put(second, RECORD.encode())
        redis.delete(KEYS.response("alice", first))
        redis.zadd(KEYS.responses_until, {f"{size} alice {first}": 1}, xx=True)
        await alice.put(new_job_id(), RECORD.encode())
        assert redis.hgetall(KEYS.response_bytes) == {
            b"alice": b"%d" % (2 * size),
            b"bob": b"%d" % size,
            b"*": b"%d" % (3 * size),
        }
        # All together take a quarter of what unfinished jobs may, one by default half of that.
        redis.hset(KEYS.measures, "mb", 4 * 3 * size)
        redis.hdel(KEYS.settings, "response_bytes:alice")
        with pytest.raises(QueueFull, match=f"the tenant's .* limit is {3 * size // 2}"):
            await bob.put(new_job_id(), RECORD.encode())
        redis.hset(KEYS.settings, "response_bytes:*", 10**9)
        with pytest.raises(QueueFull, match=f"all tenants' .* limit is {3 * size}"):
            await bob.put(new_job_id(), RECORD.encode())
        assert server.refusals() == []


def test_both_ids_name_the_job_and_others_name_nothing() -> None:
    job_id = new_job_id()
    assert job_of(response_id(job_id)) == job_of(job_id) == job_id
    for wrong in ("resp_", "job_1", "resp_alice:1", f"resp_resp_{job_id}"):
        with pytest.raises(NoSuchObject):
            job_of(wrong)


def test_what_is_too_long_is_refused_and_what_is_damaged_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = RECORD.encode()
    for damaged in (b"", data[:-3][:10], b"x" + data):
        with pytest.raises(MalformedMessage):
            read_record(damaged)
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 20)
    with pytest.raises(InvalidRequest, match="the limit of what is kept"):
        RECORD.encode()
    with pytest.raises(MalformedMessage):
        read_record(data)
