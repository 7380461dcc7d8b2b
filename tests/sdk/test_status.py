"""The snapshot that ``tidemill status`` shows."""

import pytest
import redis

from support.fake_mill import KEYS, FakeMill
from support.twins import MakeTwin, Twin
from tidemill import QueueStatus
from tidemill.protocol.errors import MalformedMessage


def test_an_empty_shard_has_nothing_to_show(producer: Twin, redis_client: redis.Redis) -> None:
    status = producer.status()
    assert (status.num_queued, status.num_running, status.num_dead_letters) == (0, 0, 0)
    assert (status.queues, status.workers, status.models) == ((), (), ())
    assert (status.scheduler_id, status.scheduler_epoch) == (None, 0)


def test_queues_workers_and_models_are_shown(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    red, blue = (make_twin(redis_url, tenant=tenant) for tenant in ("red", "blue"))
    red.submit_many([[1], [2]], priority=-1)
    mill.claim()
    blue.submit([3], priority=5)
    red.submit([3])
    mill.report(num_running=1, free_blocks=99, prompt_tokens=10, cached_tokens=4)
    other = FakeMill(redis_client, model="n")
    dead = FakeMill(redis_client, model="n")
    redis_client.zadd(KEYS.workers, {dead.worker_id: 1})
    redis_client.xadd(KEYS.dead_letters, {"j": "x"})
    status = red.status()
    assert status.queued_by_tenant == {"blue": 1, "red": 2}
    assert status.running_by_tenant == {"red": 1}
    assert (status.num_queued, status.num_running, status.num_dead_letters) == (3, 1, 1)
    assert status.queues == (
        QueueStatus("p0", "red", 1),
        QueueStatus("p1", "red", 1),
        QueueStatus("p2", "blue", 1),
    )
    by_id = {worker.info.worker_id: worker for worker in status.workers}
    assert by_id.keys() == {mill.worker_id, other.worker_id}
    report = by_id[mill.worker_id].status
    assert report is not None and (report.num_running, report.free_blocks) == (1, 99)
    assert by_id[other.worker_id].status is None
    assert [card.name for card in status.models] == ["m", "n"]
    assert status.scheduler_id == "sch_test"
    assert status.scheduler_epoch >= 1


@pytest.mark.leaks_keys
def test_what_cannot_be_read_is_noted_and_the_rest_shown(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.hset(KEYS.counters, mapping={b"q:red": "abc", b"q:blue": 2, b"r:\xff": 1})
    redis_client.hset(KEYS.measures, mapping={"rj": "nan", "mb": "abc", "lv": b"\xff"})
    redis_client.hset(KEYS.settings, "jobs:red", "-5")
    for index in (KEYS.workers, KEYS.models, KEYS.active_queues):
        redis_client.zadd(index, {b"\xff": 9e15})
    redis_client.zadd(KEYS.workers, {"broken": 9e15})
    redis_client.hset(KEYS.worker_info("broken"), "info", b"\xff")
    status = producer.status()
    assert status.queued_by_tenant == {"blue": 2}
    assert (status.num_queued, status.max_bytes, status.jobs_per_second) == (2, 0, 0.0)
    assert [worker.info.worker_id for worker in status.workers] == [mill.worker_id]
    assert [card.name for card in status.models] == ["m"]
    notes = "\n".join(status.notes)
    assert '"q:red" = "abc"' in notes and '"jobs:red" = "-5"' in notes


def test_a_model_that_is_no_text_keeps_no_job_out(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    redis_client.zadd(KEYS.models, {b"\xff": 9e15})
    redis_client.zadd(KEYS.workers, {b"\xff": 9e15})
    job = producer.submit([1])
    assert producer.job_status(job.id).model == "m"


@pytest.mark.parametrize(
    ("field", "value"), [("n", b"x"), ("ts", b"abc"), ("te", b"-"), ("md", b"\xff")]
)
def test_a_job_that_cannot_be_read_is_told_with_key_and_field(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, field: str, value: bytes
) -> None:
    job = producer.submit([1])
    key = KEYS.job(job.id)
    whole = redis_client.hget(key, field)
    redis_client.hset(key, field, value)
    with pytest.raises(MalformedMessage) as told:
        producer.job_status(job.id)
    assert f"{key}: {field}: " in str(told.value)
    redis_client.hset(key, field, whole or b"0")


@pytest.mark.leaks_keys
def test_a_batch_that_cannot_be_read_is_told_with_key_and_field(
    producer: Twin, redis_client: redis.Redis
) -> None:
    key = KEYS.batch("default", "xx")
    redis_client.hset(key, "total", "abc")
    with pytest.raises(MalformedMessage) as told:
        producer.batch("xx").status()
    assert f"{key}: total: " in str(told.value)


def test_a_job_on_a_worker_that_is_no_text_is_told_when_it_is_cancelled(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job = producer.submit([1], batch="b")
    mill.claim()
    key = KEYS.job(job.id)
    redis_client.hset(key, "w", b"\xff")
    for cancel in (lambda: producer.cancel(job.id), lambda: producer.cancel_batch("b")):
        with pytest.raises(MalformedMessage) as told:
            cancel()
        assert f"{key}: w: " in str(told.value)
    redis_client.hset(key, "w", mill.worker_id)
