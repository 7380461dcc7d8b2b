"""A tenant's jobs, the newest first."""

from typing import Any

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.twins import MakeTwin, Twin
from tidemill import InvalidRequest, MalformedMessage
from tidemill.job_list import MAX_LOOKED_AT


def ids(statuses: Any) -> list[str]:
    return [status.job_id for status in statuses]


def test_jobs_are_listed_in_pages_the_newest_first(producer: Twin, mill: FakeMill) -> None:
    made = {producer.submit([1], metadata={"n": str(n)}).id: str(n) for n in range(5)}
    # An id begins with its time; those of one millisecond are in no order.
    newest_first = sorted(made, reverse=True)
    first = producer.job_page(limit=2)
    assert ids(first.jobs) == newest_first[:2] and first.has_more
    assert [s.metadata for s in first.jobs] == [{"n": made[job]} for job in newest_first[:2]]
    second = producer.job_page(limit=2, after=first.last_id)
    last = producer.job_page(limit=2, after=second.last_id)
    assert ids((*first.jobs, *second.jobs, *last.jobs)) == newest_first
    assert second.has_more and not last.has_more and last.last_id == newest_first[-1]
    assert not producer.job_page(limit=5).has_more
    behind = producer.job_page(after=last.last_id)
    assert (behind.jobs, behind.last_id, behind.has_more) == ((), None, False)
    assert ids(producer.jobs()) == newest_first


def test_a_list_has_the_jobs_in_some_states_and_of_a_batch(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    done = producer.submit([1])
    mill.claim().finish()
    running = producer.submit([1], batch="night")
    mill.claim()
    waiting = producer.submit([1], batch="night")
    delayed = producer.submit([1], delay=3600)
    cancelled = producer.submit([1], batch="day")
    producer.cancel(cancelled.id)
    assert ids(producer.jobs(state="done")) == [done.id]
    assert ids(producer.jobs(state="running")) == ids(producer.jobs(state="run")) == [running.id]
    assert set(ids(producer.jobs(state=["queued", "delayed"]))) == {delayed.id, waiting.id}
    assert set(ids(producer.jobs(batch="night"))) == {waiting.id, running.id}
    assert ids(producer.jobs(batch="night", state="queued")) == [waiting.id]
    assert ids(producer.jobs(state="dead")) == []
    producer.cancel(delayed.id)


def test_a_page_looks_at_a_bounded_number_of_jobs_and_says_where_to_go_on(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    rare = producer.submit([1])
    producer.cancel(rare.id)
    # All newer ones are gone by their time, which the leader has not noted yet.
    latest = f"{rare.id[:-10]}ZZZZZZZ"
    newer = {f"{latest}{n:03X}": 0 for n in range(MAX_LOOKED_AT)}
    redis_client.zadd(KEYS.jobs("default"), newer)
    page = producer.job_page(state="cancelled")
    assert (page.jobs, page.has_more) == ((), True)
    assert ids(producer.job_page(state="cancelled", after=page.last_id).jobs) == [rare.id]
    assert ids(producer.jobs()) == ids(producer.jobs(state="cancelled")) == [rare.id]
    redis_client.zrem(KEYS.jobs("default"), *newer)


def test_nobody_sees_jobs_of_another_tenant(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill
) -> None:
    mine, theirs = make_twin(redis_url, tenant="mine"), make_twin(redis_url, tenant="theirs")
    job = mine.submit([1])
    assert ids(mine.jobs()) == [job.id] and ids(theirs.jobs()) == []
    mine.cancel(job.id)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"state": "tired"}, "state"),
        ({"state": ["done", ""]}, "state"),
        ({"batch": "a b"}, "batch"),
        ({"after": "x"}, "after"),
        ({"after": 5}, "after"),
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "3"}, "limit"),
    ],
)
def test_what_is_no_page_is_refused_by_its_field(
    producer: Twin, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}: ") as refusal:
        producer.job_page(**options)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "metadata",
    [
        5,
        {"": "x"},
        {"k" * 65: "x"},
        {"k": "x" * 513},
        {"k": 1},
        {1: "x"},
        {"\ud800": "x"},
        {"k": "\ud800"},
        {str(n): "" for n in range(17)},
    ],
)
def test_what_is_no_metadata_is_refused(producer: Twin, metadata: Any) -> None:
    with pytest.raises(InvalidRequest, match="metadata: ") as refusal:
        producer.submit([1], metadata=metadata)
    assert refusal.value.field == "metadata"


def test_metadata_that_cannot_be_read_is_called_so(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job = producer.submit([1])
    redis_client.hset(KEYS.job(job.id), "meta", "[1]")
    with pytest.raises(MalformedMessage, match=f"{job.id}: meta: "):
        producer.job_status(job.id)
