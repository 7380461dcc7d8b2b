"""Records of responses: kept with an owner and a life, by the gateway's own user."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.acl_server import acl_server
from support.shard import KEYS
from tidemill._async_shared import AsyncShared
from tidemill.protocol.errors import InvalidRequest, MalformedMessage, NoSuchObject
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
